"""`fairlead status` and `cancel` ask a real SLURM; a chain takes the place of a requeue. Nothing trains here."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from fairlead.cli import main
from fairlead_runs.chain import chain_begin, chain_end, chain_options
from integration_tests.slurm.cluster import Cluster
from integration_tests.slurm.jobs import Job, submit
from integration_tests.slurm.system import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.full]

OPENED = """
import os, sys, time
from pathlib import Path
from fairlead.detect import find_jobs
from fairlead.plugins import default_plugins
from fairlead_runs import RunDirectory, fingerprint
from fairlead_runs.commit import LockOwner

def opened():
    job = {"run": {"seed": 0}, "trainer": {"max_steps": 1000}}
    (found,) = find_jobs(os.environ, default_plugins()).values()
    return RunDirectory.open(Path("runs/gpt"), job=job, fingerprint=fingerprint(job), owner=LockOwner.here(found))
"""
RUN = """
with opened() as run:
    start = run.begin(resolution={}, provenance={})
    run.history.append("training", step=0)
    beats = run.heartbeat(node_rank=0, local_rank=0, rank=0, start=start)
    for step in range(1000):
        beats.beat("train", step)
        time.sleep(0.1)
"""
LINK = """
from fairlead_hpc_signals import PreemptionGuard, requeuer_here
with PreemptionGuard(["USR1"]) as guard, opened() as run:
    first = run.begin(resolution={}, provenance={}, chain=os.environ["FAIRLEAD_CHAIN"]) == 1
    Path(f"start-{os.environ['SLURM_JOB_ID']}").touch()
    until = time.monotonic() + 60
    while first and time.monotonic() < until:
        if guard.should_stop():
            guard.save_and_requeue(lambda: None, requeuer_here()).exit()
        time.sleep(0.05)
"""


def fairlead(cluster: Cluster, cwd: Path, *words: str) -> str:
    """What a command prints on the login node."""
    out = io.StringIO()
    before, sys.stdout = sys.stdout, out
    try:
        assert main(list(words), environ=cluster.environ(), cwd=cwd) == 0
    finally:
        sys.stdout = before
    return out.getvalue()


def test_status_knows_what_the_job_waits_for_and_cancel_ends_it(cluster: Cluster, tmp_path: Path) -> None:
    """Running; requeued, where SLURM lets it wait; running again; and taken out of the queue."""
    (tmp_path / "run.py").write_text(OPENED + RUN)
    job = submit(cluster, f"exec srun {sys.executable} run.py\n", tmp_path, "--time=10", "--requeue")

    def until(*words: str) -> str:
        wait_until(f"{words} in\n{said()}", lambda: all(word in said() for word in words), 60)
        return said()

    def said() -> str:
        return fairlead(cluster, tmp_path, "status", "gpt") if (tmp_path / "runs/gpt/fingerprint.json").exists() else ""

    until("gpt: running", f"slurm:{job.id}: running (RUNNING)", "its time limit is at", "steps/s", "of 1000")
    cluster.run("scontrol", "requeue", job.id)
    until("gpt: queued", "PENDING, BeginTime", "SLURM lets a job wait", "not before")
    until("gpt: running", "restarted 1 time")
    cluster.run("scontrol", "requeue", job.id)
    until("gpt: queued")
    assert f"scancel --state=PENDING {job.id}" in fairlead(cluster, tmp_path, "cancel", "gpt")
    assert job.wait("CANCELLED") == "CANCELLED"
    assert not (tmp_path / "runs/gpt/STOP").exists()
    assert "nothing to cancel" in fairlead(cluster, tmp_path, "cancel", "gpt")


def test_the_next_of_a_chain_goes_on_and_a_finished_run_cancels_the_rest(cluster: Cluster, tmp_path: Path) -> None:
    """No requeue: the first is stopped, the second finishes, and the third never starts."""
    (tmp_path / "link.py").write_text(OPENED + LINK)
    script = f"{chain_begin('gpt-1')}\nsrun {sys.executable} link.py\n{chain_end()}\n"
    options = [f"--{k}" if v is True else f"--{k}={v}" for k, v in chain_options("gpt-1").items()]
    jobs: list[Job] = [submit(cluster, script, tmp_path, *options) for _ in range(3)]
    first = tmp_path / f"start-{jobs[0].id}"
    wait_until("the first has begun", first.exists, 60)
    assert [job.state() for job in jobs] == ["RUNNING", "PENDING", "PENDING"]
    said = fairlead(cluster, tmp_path, "status", "gpt")
    assert f"slurm:{jobs[0].id} of the chain gpt-1: running (RUNNING, of 3 left)" in said
    jobs[0].signal("USR1")
    jobs[0].wait("FAILED")
    assert f"job {jobs[1].id} of the chain gpt-1 is next, of 2 left" in jobs[0].text()
    assert jobs[1].wait() == "COMPLETED"
    assert jobs[2].wait() == "CANCELLED"
    assert "no job of the chain gpt-1 is left" in fairlead(cluster, tmp_path, "status", "gpt")
    assert sorted(path.name for path in tmp_path.glob("start-*")) == [f"start-{job.id}" for job in jobs[:2]]
