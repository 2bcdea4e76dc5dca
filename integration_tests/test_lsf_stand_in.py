"""A job of LSF's is submitted, stopped and started again; FAKE `bsub`, `blaunch`, `bjobs`, `bhist` and `brequeue` do
what IBM documents of them.

LSF cannot be had here. `brequeue JOB[INDEX]` ends the job's processes by SIGTERM, then SIGKILL, and queues the job
again under its old number; near its run limit a job gets SIGUSR2. What they print follows IBM's documentation of 10.1.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

import fairlead
import fairlead_runs
from fairlead_runs import read_history
from integration_tests.exact.cases import Case, warm
from integration_tests.exact.compare import differences
from integration_tests.exact.jobs.probe import PAUSE
from integration_tests.exact.references import References
from integration_tests.jobs import JOB, Running, changed, repository, start

pytestmark = pytest.mark.slow

CASE = Case("mlp", ranks=2)


class StandIn:
    """The commands of LSF on a PATH of their own, and the element of a job array that they know."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.program("bjobs", 'cat "$0.says"')
        self.program("bhist", 'cat "$0.says" 2>/dev/null')
        # As LSF does: the job's processes are ended. Ours have saved by then.
        self.program(
            "brequeue", 'echo "$@" >> "$0.calls"; kill -TERM -"$(cat "$0.group")"; echo "Job <$1> is requeued"'
        )

    def program(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def environ(self) -> dict[str, str]:
        """What LSF gives the second element of an array, whose two slots are on one host."""
        return {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "LSB_JOBID": "4711",
            "LSB_JOBINDEX": "2",
            "LSB_JOBNAME": "mlp[2]",
            "LSB_HOSTS": "hostA hostA",
            "LSB_MCPU_HOSTS": "hostA 2",
            "LSB_BATCH_JID": "4711[2]",
        }

    def start(self, cwd: Path, **environ: str) -> Running:
        running = start(*CASE.words(), cwd=cwd, environ={**self.environ(), "OMP_NUM_THREADS": "1", **environ})
        (self.folder / "brequeue.group").write_text(str(running.process.pid))
        return running

    def requeued(self) -> list[str]:
        calls = self.folder / "brequeue.calls"
        return calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """The undisturbed run, for all."""
    return References(tmp_path_factory.mktemp("undisturbed"), warm)


@pytest.mark.full
@pytest.mark.parametrize(
    ("says", "history", "number", "reason", "code"),
    [
        ("RUN|-|0:2 L|-|-", "", signal.SIGUSR2, "time_limit", 75),
        ("SSUSP|-|-|-|The job was preempted", "", signal.SIGTERM, "preempted", 75),
        (
            "RUN|-|11:0 L|-|-",
            "Sat Nov 21 10:00:00: Signal <KILL> requested by user or administrator <ann>;",
            signal.SIGTERM,
            "cancelled",
            143,
        ),
    ],
)
def test_a_job_of_lsf(
    references: References, tmp_path: Path, says: str, history: str, number: int, reason: str, code: int
) -> None:
    """As with SLURM, by `brequeue`, with the array's index; a job that was killed stays so."""
    lsf = StandIn(tmp_path / "lsf")
    (lsf.folder / "bjobs.says").write_text(f"{says}\n")
    (lsf.folder / "bhist.says").write_text(f"{history}\n")
    cwd = tmp_path / "job"
    cwd.mkdir()
    run = CASE.directory(cwd).with_name("mlp-task-2")

    def saved() -> bool:
        return any(event["event"] == "checkpoint" for event in read_history(run / "history.jsonl"))

    running = lsf.start(cwd, **{PAUSE: "train_batch_start=0.3"})
    running.until(saved, "the first checkpoint")
    os.kill(running.process.pid, number)
    ended = running.end()
    assert ended.code == code, ended.text
    (stop,) = [event for event in read_history(run / "history.jsonl") if event["event"] == "stop"]
    assert stop["reason"] == reason
    assert lsf.requeued() == (["4711[2]"] if code == 75 else [])
    again = lsf.start(cwd).end()
    assert again.code == 0, again.text
    begun = [event["step"] for event in read_history(run / "history.jsonl") if event["event"] == "training"]
    assert begun == [0, stop["step"]]
    assert differences(references.of(CASE).run, run) == []


def test_a_job_is_submitted_and_its_script_runs(tmp_path: Path) -> None:
    """The script that `bsub` reads from its input is run by bash, as LSF runs it; `blaunch` starts the ranks."""
    lsf = StandIn(tmp_path / "lsf")
    lsf.program("bsub", 'cat > "$0.script"; echo "Job <4711> is submitted to default queue <normal>."')
    lsf.program("blaunch", 'export LSF_PM_TASKID=1; exec "$@"')
    small = {"max_steps": 2, "devices": 1, "strategy": "auto", "checkpoint": {"every_n_steps": 1}}
    job = changed(
        JOB,
        trainer=small,
        resources={"nodes": 1, "devices_per_node": 1, "device": "cpu"},
        submit={"to": "lsf", "time": "01:00:00", "partition": "normal"},
    )
    file = repository(tmp_path / "user", job=job)
    environ = {**os.environ, **lsf.environ(), "LSB_HOSTS": "hostA", "LSB_MCPU_HOSTS": "hostA 1", "OMP_NUM_THREADS": "1"}
    submission = fairlead.submit(str(file), sweep=["run.seed=7,8"], environ=environ, cwd=tmp_path)
    assert submission.id == "4711"
    script = (lsf.folder / "bsub.script").read_text()
    assert {"#BSUB -J 'small[1-2]'", "#BSUB -n 1", "#BSUB -q normal", "#BSUB -W 60"} <= set(script.splitlines())
    (tmp_path / "user/mine/model.py").write_text("raise RuntimeError('not the code as submitted')")
    done = subprocess.run(
        ["bash"], input=script, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (lsf.folder / "bjobs.says").write_text("DONE|-|-\n")
    assert submission.state().phase == "finished"
    assert fairlead_runs.state(tmp_path / "runs/small-task-2").state == "finished"
    assert "seed: 8" in (tmp_path / "runs/small-task-2/job.yaml").read_text()
