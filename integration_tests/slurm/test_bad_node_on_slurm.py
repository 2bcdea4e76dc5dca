"""A node whose name resolution is broken, and what `fairlead submit --screen` writes: found, left out, trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairlead.cli import main
from fairlead_runs import state
from integration_tests.slurm.cluster import Cluster
from integration_tests.slurm.jobs import Job
from integration_tests.slurm.test_submit_on_slurm import environ, repository
from integration_tests.slurm.training import history, nothing_runs

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.fixture
def bad_node(cluster: Cluster, tmp_path: Path) -> Iterator[str]:
    """A node that knows the names of no other."""
    if cluster.plan.isolation == "none":
        pytest.skip("the nodes share their files")
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{cluster.plan.nodes['n2'].address} n2\n")
    cluster.run(*cluster.on("n2", "mount", "--bind", str(hosts), "/etc/hosts"))
    yield "n2"
    cluster.run(*cluster.on("n2", "umount", "/etc/hosts"))


def test_a_bad_node_is_found_and_left_out_and_the_run_trains_on_the_others(
    cluster: Cluster, bad_node: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found before a rank starts; the job is requeued, keeps its user's exclusions, and a later submission has both."""
    cwd = repository(
        tmp_path / "home",
        trainer={"max_epochs": 1, "devices": 1},
        resources={"nodes": 2, "devices_per_node": 1, "device": "cpu"},
        submit={"to": "slurm", "time": "00:30:00", "gpus": "none", "exclusive": True},
    )
    three = ["--set", "resources.nodes=3"]
    assert main(["submit", "job.yaml", "--screen", "--json", *three], environ=environ(cluster), cwd=cwd) == 0
    made = json.loads(capsys.readouterr().out)
    job = Job(cluster, made["id"], cwd / f"runs/mlp/submissions/1/logs/slurm-{made['id']}.out")
    assert job.wait(seconds=200) == "COMPLETED", job.text()
    assert f"bad: {bad_node}: not there" in job.text()
    assert "n1 does not resolve" in job.text()
    shown = job.shown()
    assert (shown["Restarts"], shown["ExcNodeList"], job.nodes()) == ("1", "n2", ["n1", "n3", "n4"]), job.text()
    run = state(cwd / "runs/mlp")
    assert (run.state, run.starts) == ("finished", 1), job.text()  # no rank was started beside the bad node
    (event,) = history(cwd, "excluded", run=cwd / "runs/mlp")
    assert list(event["nodes"]) == [bad_node]
    nothing_runs(job)
    assert (
        main(["submit", "job.yaml", "--dry-run", "--set", "submit.exclude=n7"], environ=environ(cluster), cwd=cwd) == 0
    )
    assert "#SBATCH --exclude=n7,n2\n" in capsys.readouterr().out
