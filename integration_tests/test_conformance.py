"""Every registered plugin of every axis keeps the contract; a third party's, installed beside ours, too."""

from __future__ import annotations

from typing import Any

import pytest

from fairlead import PluginManager
from fairlead.testing import CONFORMANCE

# One rank's variables, as each launcher sets them.
ENVIRONS: dict[str, dict[str, str]] = {
    "torchelastic": {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    },
    "slurm": {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_NTASKS": "4",
        "SLURM_NNODES": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "node[01-02]",
        "SLURM_JOB_NODELIST": "node[01-02]",
        "SLURM_NODELIST": "node[01-02]",
        "SLURM_TASKS_PER_NODE": "2(x2)",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURMD_NODENAME": "node02",
    },
    "manual": {"MASTER_ADDR": "127.0.0.1", "NODE_RANK": "1", "NNODES": "2"},
}
# Fields without which a config means nothing.
EXAMPLES: dict[str, dict[str, Any]] = {
    "checkpoint_io.remote": {"url": "s3://bucket/prefix"},
    "requeue.command": {"argv": ["true"]},
}


def _suites() -> dict[str, type]:
    suites: dict[str, type] = {}
    for record in PluginManager().records():
        settings: dict[str, Any] = {"plugin_name": record.name, "example": EXAMPLES.get(record.key, {})}
        if record.axis == "environment":
            settings["example_environ"] = ENVIRONS.get(record.name)
        name = "Test_" + record.key.replace(".", "_").replace("-", "_")
        suites[name] = type(name, (CONFORMANCE[record.axis],), {**settings, "__module__": __name__})
    return suites


globals().update(_suites())


def test_every_axis_has_a_plugin_here() -> None:
    """The tests above are made from what is installed: nothing installed would be nothing tested."""
    assert {record.axis for record in PluginManager().records()} == set(CONFORMANCE)


@pytest.fixture(autouse=True)
def rank_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that is built tells Lightning its rank; the tests after it are rank 0 again."""
    from lightning_utilities.core.rank_zero import rank_zero_only

    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
