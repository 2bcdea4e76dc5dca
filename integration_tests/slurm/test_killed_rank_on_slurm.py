"""A rank of `srun fairlead fit` that is killed without a word, as by the kernel short of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.slurm.cluster import Cluster
from integration_tests.slurm.training import PAIR, fit, history, until_saved

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_killed_rank_is_a_failure(cluster: Cluster, tmp_path: Path, rank: int) -> None:
    """The SIGTERM by which srun ends the other is no stop: nothing is requeued, and the newest checkpoint is kept."""
    step = "srun --kill-on-bad-exit=1 {command}\n"
    job = fit(cluster, tmp_path, case=PAIR, pause=1.0, script=step)
    until_saved(job, tmp_path, 3)
    cluster.run(*cluster.on(job.nodes()[rank], "pkill", "-KILL", "-n", "-f", "fairlead fit"))
    assert job.wait("FAILED", "PENDING", seconds=120) == "FAILED", job.text()
    assert job.shown()["Restarts"] == "0"
    assert not history(tmp_path, "stop", "requeue"), job.text()
    assert f"task {rank}: Killed" in job.text()
    assert [event["rank"] for event in history(tmp_path, "failed")] == [rank], job.text()
    assert (PAIR.directory(tmp_path) / "checkpoints" / "step-00000003").is_dir()
