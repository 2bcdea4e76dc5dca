"""Communication and scaling over four nodes of a real SLURM, each with a network of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from integration_tests.slurm.cluster import Cluster
from integration_tests.slurm.jobs import submit
from integration_tests.test_bench_scaling import sized

pytestmark = pytest.mark.slow
FAIRLEAD = f"{sys.executable} -m fairlead"


def test_collectives_between_four_nodes_and_the_link_of_each_pair(cluster: Cluster, tmp_path: Path) -> None:
    words = "bench comm --sizes 1KiB,1MiB --collectives all_reduce,send_recv --rounds 2 --pairs --json"
    job = submit(cluster, f"srun -N4 -n4 {FAIRLEAD} {words} > comm.json\n", tmp_path, "-N4", "--exclusive")
    assert job.wait() == "COMPLETED", job.text()
    record = json.loads((tmp_path / "comm.json").read_text())
    assert (record["ranks"], record["hosts"]) == (4, ["n1", "n2", "n3", "n4"])
    assert all(min(row["seconds"]) > 0 for row in record["collectives"])
    pairs = {tuple(pair["nodes"]) for pair in record["pairs"]}
    assert pairs == {(f"n{a}", f"n{b}") for a in range(1, 5) for b in range(a + 1, 5)}
    assert isinstance(record["slow"], list)


@pytest.mark.full
def test_a_job_is_timed_on_one_to_four_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """With the loss curve beside one process (document D's estimate, measured)."""
    file = sized(tmp_path)
    words = f"bench scaling {file} --workers 1,2,4 --rounds 2 --steps 8 --launcher 'srun -N {{workers}} -n {{workers}}'"
    job = submit(cluster, f"{FAIRLEAD} {words} --json > scaling.json\n", tmp_path, "-N4", "--exclusive")
    assert job.wait(seconds=600) == "COMPLETED", job.text()
    record = json.loads((tmp_path / "scaling.json").read_text())
    assert [(one["workers"], len(one["hosts"]), one["batch_size"]) for one in record["workers"]] == [
        (1, 1, 8),
        (2, 2, 4),
        (4, 4, 2),
    ]
    assert all(one["efficiency"] > 0 and one["epoch_s"] > 0 for one in record["workers"])
    assert record["loss"]["largest_difference"] < 1e-6
    assert len(record["loss"]["curves"]["4"]) > 4
