"""`fairlead submit` on the real cluster: stopped, started again, and ended as if nothing had happened; a sweep."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fairlead
from fairlead import yaml
from fairlead.cli import main
from fairlead.plugins import default_plugins
from fairlead_launch import submission as fairlead_submission
from fairlead_launch.submission import read_submission
from fairlead_launch.submission.interface import build_submitter
from fairlead_runs import RunState
from integration_tests.exact.cases import Case
from integration_tests.exact.compare import differences
from integration_tests.exact.jobs.probe import PAUSE
from integration_tests.exact.references import References
from integration_tests.slurm.cluster import Cluster
from integration_tests.slurm.jobs import Job, submit
from integration_tests.slurm.system import wait_until
from integration_tests.slurm.training import PAIR, history, nothing_runs, until_at, until_saved

pytestmark = pytest.mark.slow

QUIET_WANDB = {"WANDB_X_DISABLE_STATS": "true", "WANDB_X_DISABLE_META": "true", "WANDB_CONSOLE": "off"}
"""What W&B records of the machine is nothing to us."""
JOBS = Path(__file__).parents[1] / "exact/jobs"


def repository(folder: Path, **sections: Any) -> Path:
    """A user's repository: the code of a job of ours, committed, with a job file that says how to submit it."""
    code = folder / "integration_tests/exact/jobs"
    shutil.copytree(JOBS, code, ignore=shutil.ignore_patterns("__pycache__"))
    data: Any = yaml.load_file(JOBS / "mlp/job.yaml").data
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section}
    (folder / "job.yaml").write_text(yaml.dump(data))
    (folder / ".gitignore").write_text("runs/\nplace-*\nresult*\n__pycache__/\n")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "a job"]):
        subprocess.run([*git, *words], check=True)
    return folder


def environ(cluster: Cluster, **more: str) -> dict[str, str]:
    return {**cluster.environ(), "OMP_NUM_THREADS": "1", **more}


def one_rank(job: Job) -> None:
    """That of the second node; `pkill -n` takes the newest."""
    job.cluster.run(*job.cluster.on(job.nodes()[1], "pkill", "-USR1", "-n", "-f", "fairlead fit"))


def an_urgent_job(job: Job) -> None:
    nodes = ",".join(job.nodes())
    submit(job.cluster, "sleep 2\n", job.output.parent, "-p", "urgent", "-N2", "--exclusive", "-w", nodes)


def somebody_requeues(job: Job) -> None:
    job.cluster.run("scontrol", "requeue", job.id)


def a_rank_hangs(job: Job) -> None:
    """It answers nobody, and its job is warned then."""
    job.cluster.run(*job.cluster.on(job.nodes()[1], "pkill", "-STOP", "-n", "-f", "fairlead fit"))
    job.signal("TERM")


def a_node_fails(job: Job) -> None:
    """Not that of the batch script, with which the output would go."""
    victim = job.nodes()[1]
    job.cluster.fail(victim)
    job.wait("PENDING", "COMPLETING", seconds=60)
    job.cluster.boot(victim)


DISTURBANCES: tuple[tuple[str, int, Callable[[Job], None]], ...] = (
    ("train_batch_start", 2, lambda job: job.signal("USR1", "-b")),
    ("train_batch_start", 5, one_rank),
    ("validation_batch_start", 8, an_urgent_job),  # SIGTERM
    ("train_batch_start", 11, somebody_requeues),
    ("train_batch_start", 14, a_rank_hangs),
    ("train_batch_start", 17, a_node_fails),
)
"""Where the first rank is, at which step, and what happens to the job then."""


@pytest.mark.parametrize("count", [2, pytest.param(len(DISTURBANCES), marks=pytest.mark.full)])
def test_disturbed_in_every_way_it_ends_with_the_bits_of_an_undisturbed_run(
    cluster: Cluster, references: References, tmp_path: Path, count: int
) -> None:
    """One run at W&B, one output without a word too many; what runs is the copy of the code, to the end."""
    cwd = repository(
        tmp_path,
        data={"args": {"batches": 8, "noise": 0.1, "workers": 0}},
        trainer={"loggers": ["tensorboard", {"name": "wandb", "project": "tests", "offline": True}]},
        resources={"nodes": 2, "devices_per_node": 1, "device": "cpu"},
        submit={
            "to": "slurm",
            "time": "00:30:00",
            "gpus": "none",
            "exclusive": True,
            "extra": {"comment": "it's # one; $HOME"},
        },
    )
    slow = {PAUSE: "train_batch_start=0.3 validation_batch_start=0.5"}
    submission = fairlead.submit("job.yaml", environ=environ(cluster, **slow, **QUIET_WANDB), cwd=cwd)
    # What is changed from now on is not what was submitted.
    (cwd / "integration_tests/exact/jobs/mlp/model.py").write_text("raise RuntimeError('not the code as submitted')\n")
    output = cwd / f"runs/mlp/submissions/1/logs/slurm-{submission.id}.out"
    job = Job(cluster, submission.id, output)
    for number, (place, step, disturb) in enumerate(DISTURBANCES[:count], start=1):
        wait_until(f"start {number}", lambda n=number: len(history(cwd, "training")) == n, 300)  # type: ignore[misc]
        until_at(job, cwd, place, step)
        assert submission.state().phase == "running"
        disturb(job)
        wait_until(f"it was started {number} times again", lambda n=number: job.shown()["Restarts"] == str(n), 150)  # type: ignore[misc]
        for file in cwd.glob("place-*"):
            file.unlink()
    ended = submission.result(timeout=200, poll_s=0.5)
    assert isinstance(ended, RunState)
    assert (ended.state, ended.step, ended.starts) == ("finished", 24, count + 1)
    job.wait("COMPLETED", seconds=60)  # the run is finished, and its processes end
    assert job.shown()["Comment"].startswith("it's")
    assert job.shown()["ExitCode"] == "0:0"
    # The reference has no git around it, so that its checkpoints name no commit.
    found = differences(references.of(PAIR).run, cwd / "runs/mlp")
    assert not [one for one in found if "manifest['code']" not in one], submission.logs()
    # The first four stops lose no step; behind the others the newest checkpoint counts.
    at = [event["step"] for event in history(cwd, "training")]
    saving = min(4, count)
    assert at[1 : saving + 1] == [event["step"] for event in history(cwd, "stop")][:saving]
    the_copy_has_run(cwd, starts=count + 1)
    one_run_at_wandb(cwd / "runs/mlp", starts=count + 1)
    a_clean_log(job.text(), starts=count + 1)
    nothing_runs(job)


@pytest.mark.full
def test_the_time_limit_that_was_asked_for(cluster: Cluster, references: References, tmp_path: Path) -> None:
    """SLURM looks at its clock every half minute, and may warn a minute early."""
    case = Case("mlp", ranks=1)
    cwd = repository(
        tmp_path,
        data={"args": {"batches": 8, "noise": 0.1, "workers": 0}},
        resources={"nodes": 1, "devices_per_node": 1, "device": "cpu"},
        submit={"to": "slurm", "time": "00:02:00", "gpus": "none", "warn": 20},
    )
    given = environ(cluster, **{PAUSE: "train_batch_start=5"})
    submission = fairlead.submit("job.yaml", overrides=["trainer.devices=1"], environ=given, cwd=cwd)
    ended = submission.result(timeout=500, poll_s=0.5)
    assert isinstance(ended, RunState)
    assert (ended.state, ended.step, ended.starts) == ("finished", 24, 2), submission.logs()
    found = differences(references.of(case).run, cwd / "runs/mlp")
    assert not [one for one in found if "manifest['code']" not in one], submission.logs()
    (stop,) = history(cwd, "stop")
    assert stop["reason"] == "time_limit"


def the_copy_has_run(cwd: Path, *, starts: int) -> None:
    """In every start, with the commit that was submitted."""
    files = [cwd / f"runs/mlp/starts/{number}/provenance.json" for number in range(1, starts + 1)]
    git = [json.loads(file.read_text())["git"] for file in files]
    commit = subprocess.run(["git", "-C", str(cwd), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert {start["commit"] for start in git} == {commit.stdout.strip()}
    assert {start["snapshot"]["path"] for start in git} == {str(cwd / "runs/mlp/submissions/1/code")}
    assert [event["code_changed"] for event in history(cwd, "start")] == [None, *[False] * (starts - 1)]


def one_run_at_wandb(run: Path, *, starts: int) -> None:
    """Each start has left a record for the same run; what is in it, packages/lightning/tests shows."""
    identity = json.loads((run / "wandb-run.json").read_text())["id"]
    records = [folder.name.rpartition("-")[2] for folder in (run / "wandb").glob("offline-run-*")]
    assert records == [identity] * starts


def a_clean_log(text: str, *, starts: int) -> None:
    """Each start reports its beginning once, and only rank 1's death in a failed node is reported as a failure."""
    assert text.count("start       2 ranks on 2 nodes") == starts
    assert text.count("resumes from") == starts - 1
    by_itself = {4, 6}  # somebody requeues the job, or SLURM does as a node has failed
    stops = [number for number in range(1, starts) if number not in by_itself]
    assert text.count("; the job restarts (scontrol requeue") == len(stops), text
    for noise in ("Traceback", "c10d", "frame #", "Exception ignored", "Error:"):
        assert noise not in text, text


@pytest.mark.full
def test_a_sweep_is_an_array_with_a_run_for_each_member(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four members, two at a time; `fairlead runs` shows them, the best first."""
    cwd = repository(
        tmp_path,
        resources={"nodes": 1, "devices_per_node": 1, "device": "cpu"},
        submit={"to": "slurm", "time": "00:30:00", "gpus": "none"},
    )
    words = ["submit", "job.yaml", "--sweep", "model.args.width=8,16", "--sweep", "trainer.max_epochs=1,2", "--json"]
    code = main([*words, "--max-parallel", "2"], environ=environ(cluster), cwd=cwd)
    made = json.loads(capsys.readouterr().out)
    assert code == 0
    job = Job(cluster, made["id"], cwd / f"runs/mlp/submissions/1/logs/slurm-{made['id']}_0.out")
    assert "ArrayTaskThrottle=2" in cluster.run("scontrol", "show", "job", "-o", job.id)
    record = read_submission(cwd / "runs/mlp-task-3")
    assert record is not None
    assert (record.id, record.sweep) == (f"{job.id}_3", ("model.args.width=16", "trainer.max_epochs=2"))
    submitter = build_submitter(record.submit, environ(cluster), default_plugins())
    wait_until("the array is done", lambda: submitter.state(job.id).phase not in ("queued", "running"), 200)
    assert (submitter.state(job.id).phase, submitter.state(record.id).phase) == ("finished", "finished"), job.text()
    main(["runs", "runs/mlp"], environ=dict(os.environ), cwd=cwd)
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[-2:] == ["model.args.width", "trainer.max_epochs"]
    assert sorted(row.split()[0] for row in rows) == [f"mlp-task-{n}" for n in range(4)]
    assert all(row.split()[1] == "finished" for row in rows), job.text()
    best = [float(row.split()[4].partition("=")[2]) for row in rows]
    assert best == sorted(best)


@pytest.mark.full
def test_four_nodes_with_threads_and_two_whose_ranks_are_started_again(cluster: Cluster, tmp_path: Path) -> None:
    """One task for each of four nodes, with its CPUs; one for each of two, whose launcher starts two ranks, twice."""
    cwd = repository(tmp_path, trainer={"max_epochs": 1}, submit={"to": "slurm", "time": "00:30:00"})
    given = {name: value for name, value in environ(cluster).items() if name != "OMP_NUM_THREADS"}

    def submitted(name: str, *overrides: str, **more: str) -> fairlead_submission.Submission:
        words = [f"run.name={name}", *overrides]
        return fairlead.submit("job.yaml", overrides=words, environ={**given, **more}, cwd=cwd)

    resources = "resources={nodes: %d, devices_per_node: %d, device: cpu, cpus_per_device: %d}"
    four = submitted("four", resources % (4, 1, 2), "trainer.devices=1")
    slow = {PAUSE: "train_batch_start=0.4"}
    launched = submitted("launched", resources % (2, 2, 1), "trainer.devices=2", "submit.tasks=node", **slow)
    ended = four.result(timeout=200, poll_s=0.5)
    job = Job(cluster, launched.id, Path(str(launched.records[0].output)))
    until_saved(job, cwd, 3, run=launched.runs[0])
    cluster.run(*cluster.on(job.nodes()[1], "pkill", "-KILL", "-n", "-f", "fairlead fit"))
    again = launched.result(timeout=200, poll_s=0.5)
    for submission, end, says in ((four, ended, "4 ranks on 4 nodes"), (launched, again, "4 ranks on 2 nodes")):
        assert isinstance(end, RunState)
        assert (end.state, end.step) == ("finished", 8), submission.logs()
        assert says in submission.logs()
    assert "2 threads each" in four.logs()
    assert isinstance(again, RunState)
    assert (again.starts, job.shown()["Restarts"]) == (2, "0"), launched.logs()


@pytest.mark.parametrize("gpus", ["node", "task"])
def test_slurm_takes_the_script_for_gpus(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], gpus: str
) -> None:
    """Four nodes with a task for each GPU; `sbatch --test-only` says when it would run."""
    cwd = repository(
        tmp_path,
        resources={"nodes": 4, "devices_per_node": 2, "device": "a100", "cpus_per_device": 2},
        submit={"to": "slurm", "time": "24:00:00", "gpus": gpus},
    )
    sets = ["--set", "trainer.accelerator=cuda", "--set", "trainer.devices=2"]
    assert main(["submit", "job.yaml", "--dry-run", *sets], environ=environ(cluster), cwd=cwd) == 0
    script = capsys.readouterr().out
    asked = "#SBATCH --gpus-per-node=2" if gpus == "node" else "#SBATCH --gpus-per-task=1"
    assert {"#SBATCH --nodes=4", "#SBATCH --ntasks-per-node=2", asked} <= set(script.splitlines())
    done = subprocess.run(
        ["sbatch", "--test-only"], input=script, env=environ(cluster), capture_output=True, text=True, cwd=cwd
    )
    assert "to start at" in done.stderr, done.stderr
    assert not (cwd / "runs").exists()
