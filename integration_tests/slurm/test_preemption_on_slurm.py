"""A custom training loop in a `Run` on two nodes: every step is done once, whatever SLURM does."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fairlead_runs.commit import newest_complete
from integration_tests.slurm.cluster import Cluster
from integration_tests.slurm.jobs import Job, submit
from integration_tests.slurm.system import wait_until

pytestmark = pytest.mark.slow

STEPS = 60
LOOP = f"{sys.executable} -P {Path(__file__).with_name('custom_loop.py')} {STEPS}"
SHAPE = ("-N2", "--ntasks-per-node=2", "--exclusive", "-w", "n[1-2]")


def training(cluster: Cluster, cwd: Path, *options: str, script: str = f"srun {LOOP}\n") -> Job:
    """A job that has begun to train."""
    job = submit(cluster, script, cwd, *SHAPE, *options, environ={"OMP_NUM_THREADS": "1"})
    until_step(job, cwd, 5)
    return job


def until_step(job: Job, cwd: Path, step: int) -> None:
    def there() -> bool:
        assert job.state() in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), job.text()
        return len(steps(cwd)) >= step

    wait_until(f"step {step}", there, 120)


def steps(cwd: Path) -> list[int]:
    file = cwd / "steps"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def outcomes(cwd: Path) -> list[str]:
    return (cwd / "outcomes").read_text().splitlines()


def every_step_once(job: Job, cwd: Path, restarts: int) -> None:
    assert job.wait() == "COMPLETED", job.text()
    assert steps(cwd) == list(range(1, STEPS + 1)), job.text()
    assert (cwd / "done").exists()
    assert job.shown()["Restarts"] == str(restarts)


def test_an_urgent_job_takes_the_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """Started again exactly once; nothing is lost, nothing done twice."""
    job = training(cluster, tmp_path)
    submit(cluster, "sleep 3\n", tmp_path, "-p", "urgent", *SHAPE)
    every_step_once(job, tmp_path, restarts=1)
    assert outcomes(tmp_path) == ["preempted 75 True"]


@pytest.mark.full
def test_two_warnings(cluster: Cluster, tmp_path: Path) -> None:
    """`--signal=USR1@...` comes to the tasks; here at once, and to one rank of the job that goes on."""
    job = training(cluster, tmp_path)
    job.signal("USR1")
    wait_until("it runs again", lambda: job.shown()["Restarts"] == "1" and job.state() == "RUNNING", 60)
    until_step(job, tmp_path, len(steps(tmp_path)) + 3)
    cluster.run(*cluster.on("n2", "pkill", "-USR1", "-o", "-f", "custom_loop.py"))
    every_step_once(job, tmp_path, restarts=2)


def test_a_person_cancels_it(cluster: Cluster, tmp_path: Path) -> None:
    """Saved, and not started again."""
    job = training(cluster, tmp_path)
    cluster.run("scancel", job.id)
    assert job.wait() == "CANCELLED"
    assert outcomes(tmp_path) == ["cancelled 143 False"]
    newest = newest_complete(tmp_path / "run/checkpoints").checkpoint
    assert newest is not None
    assert newest.step == steps(tmp_path)[-1]


@pytest.mark.full
def test_a_scheduler_that_does_not_say_why(cluster: Cluster, tmp_path: Path) -> None:
    """The question hangs, the requeue takes seconds: the job goes on all the same, and nothing is done twice."""
    slow = tmp_path / "slow"
    slow.mkdir()
    scontrol = slow / "scontrol"
    scontrol.write_text(
        '#!/bin/sh\nPATH=${PATH#*:}\nif [ "$1" = show ]; then exec sleep 600; fi\nsleep 3\nexec scontrol "$@"\n'
    )
    scontrol.chmod(0o755)
    job = training(cluster, tmp_path, script=f"export GRACE=20\nPATH={slow}:$PATH srun {LOOP}\n")
    job.signal("USR1")
    every_step_once(job, tmp_path, restarts=1)
    assert outcomes(tmp_path) == ["unknown 75 True"]


def test_a_rank_that_is_stopped(cluster: Cluster, tmp_path: Path) -> None:
    """The others do not wait for it: requeued within this cluster's KillWait of 10 s, from the newest checkpoint."""
    job = training(cluster, tmp_path)
    cluster.run(*cluster.on("n2", "pkill", "-STOP", "-n", "-f", "custom_loop.py"))
    job.signal("TERM")
    wait_until("it was requeued", lambda: job.shown()["Restarts"] == "1", 15)
    assert job.wait() == "COMPLETED", job.text()
    # Half of the time; less where a moment has passed between the signal and the question. Where the others wait for it
    # in their step's all-reduce they leave when no time is left.
    said = r"did not answer within (5|4\.\d+) s|no time is left, and this rank is still in its step"
    assert re.search(said, job.text()), job.text()
    assert "scontrol requeue" in job.text()
