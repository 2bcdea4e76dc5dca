"""`fairlead status` and `cancel` query a real SLURM. Nothing trains here."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from fairlead.cli import main
from integration_tests.slurm.cluster import Cluster
from integration_tests.slurm.jobs import submit
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
