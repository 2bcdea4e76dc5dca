"""`srun fairlead fit` on two nodes, disturbed as SLURM disturbs, ends as an undisturbed run on one machine."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from integration_tests.exact.cases import Case
from integration_tests.exact.compare import differences
from integration_tests.exact.jobs.probe import PAUSE
from integration_tests.exact.references import References
from integration_tests.jobs import FAIRLEAD
from integration_tests.slurm.cluster import Cluster
from integration_tests.slurm.jobs import Job, submit
from integration_tests.slurm.system import wait_until

pytestmark = pytest.mark.slow

CASE = Case("mlp", ranks=4)
SHAPE = ("-N2", "--ntasks-per-node=2", "--exclusive")


def fit(cluster: Cluster, cwd: Path, *options: str, pause: float = 0.0, behind: str = "") -> Job:
    """Submits the job on two nodes with two tasks each; a step takes `pause` seconds longer."""
    words = [FAIRLEAD, *CASE.words(), "--set", "trainer.devices=2", "--set", "trainer.num_nodes=2"]
    environ = {PAUSE: f"train_batch_start={pause}", "OMP_NUM_THREADS": "1"}
    script = f"srun {shlex.join(words)}\nrc=$?\n{behind}\nexit $rc\n"
    return submit(cluster, script, cwd, *SHAPE, *options, environ=environ)


def history(cwd: Path, *names: str) -> list[dict[str, Any]]:
    """The events of the run, or those of some kinds."""
    file = CASE.directory(cwd) / "history.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [event for event in events if not names or event["event"] in names]


def until_saved(job: Job, cwd: Path, step: int) -> None:
    """Waits until a checkpoint of this step or a later one is committed."""

    def saved() -> bool:
        assert job.state() in ("PENDING", "CONFIGURING", "RUNNING"), job.text()
        return any(event["step"] >= step for event in history(cwd, "checkpoint"))

    wait_until(f"step {step} is saved", saved, 120)


def the_same(references: References, cwd: Path, job: Job) -> None:
    found = differences(references.of(CASE).run, CASE.directory(cwd))
    assert not found, "\n".join(["not as if nothing had happened:", *found, job.text()])


def test_two_nodes_compute_what_one_machine_computes(cluster: Cluster, references: References, tmp_path: Path) -> None:
    """R53, R60: the same bits as four ranks on one machine; the run says where it ran."""
    job = fit(cluster, tmp_path)
    assert job.wait() == "COMPLETED", job.text()
    the_same(references, tmp_path, job)
    (start,) = history(tmp_path, "start")
    assert start["job"] == f"slurm:{job.id}"
    assert start["world_size"] == 4


def test_a_cancelled_job_is_saved_and_goes_on_when_submitted_again(
    cluster: Cluster, references: References, tmp_path: Path
) -> None:
    """`scancel`: SIGTERM to all tasks at once, often twice; nothing that was trained is lost."""
    job = fit(cluster, tmp_path, pause=0.3)
    until_saved(job, tmp_path, 3)
    job.cluster.run("scancel", job.id)
    assert job.wait() == "CANCELLED"
    stopped = history(tmp_path, "checkpoint")[-1]
    assert stopped["reason"] == "terminated", job.text()
    again = fit(cluster, tmp_path)
    assert again.wait() == "COMPLETED", again.text()
    assert f"step-{stopped['step']:08d}" in history(tmp_path, "start")[-1]["resumed_from"]
    the_same(references, tmp_path, again)


def test_a_node_that_fails_costs_the_steps_behind_the_last_checkpoint(
    cluster: Cluster, references: References, tmp_path: Path
) -> None:
    """SLURM starts the job again on nodes that are left; it goes on, without a word from the user."""
    job = fit(cluster, tmp_path, pause=0.5)
    until_saved(job, tmp_path, 6)
    node = job.shown()["NodeList"].replace("n[", "").split("-")[0].split(",")[0]
    victim = f"n{int(node.removeprefix('n')) + 1}"  # not the one of the batch script
    cluster.fail(victim)
    try:
        wait_until("the job runs again", lambda: len(history(tmp_path, "start")) == 2, 120)
        assert job.wait() == "COMPLETED", job.text()
    finally:
        cluster.boot(victim)
    assert job.shown()["Restarts"] == "1"
    the_same(references, tmp_path, job)
