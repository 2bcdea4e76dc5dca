"""`fairlead launch` inside a job that has started its processes already."""

from __future__ import annotations

from typing import Any

import pytest

from fairlead import PluginManager
from fairlead.errors import ConfigError
from fairlead_launch.outer_launch import find_outer_launch

SRUN = {
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
ONE_A_NODE = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}
ONE_A_NODE["SLURM_LOCALID"] = "0"
MPI = {f"OMPI_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK", "NODE_RANK")}
MPI |= {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "count", "rank", "variables"),
    [
        (SRUN, 1, 3, {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "1", "MASTER_ADDR": "n1"}),
        (ONE_A_NODE, 1, 1, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "NODE_RANK": "1", "MASTER_ADDR": "n1"}),
        (ONE_A_NODE, 4, None, {"NODE_RANK": "1", "MASTER_ADDR": "n1"}),
        (MPI, 1, 1, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}),
        ({"MASTER_ADDR": "a", "NNODES": "2", "NODE_RANK": "1", "MASTER_PORT": "9"}, 1, None, {"MASTER_PORT": "9"}),
    ],
)
def test_a_process_is_a_rank_or_the_launcher_of_its_node(
    environ: dict[str, str], count: int, rank: int | None, variables: dict[str, Any], plugins: PluginManager
) -> None:
    place = find_outer_launch("auto" if count == 1 else count, count, environ, plugins)
    assert place is not None
    assert place.rank == rank
    assert {name: place.variables()[name] for name in variables} == variables


@pytest.mark.parametrize("environ", [{}, {**SRUN, "FAIRLEAD_LAUNCHED": "1"}, {**SRUN, "SLURM_STEP_ID": "4294967291"}])
def test_alone(environ: dict[str, str], plugins: PluginManager) -> None:
    """Also in a rank of ours, which starts another job, and in a batch script, which is no rank."""
    assert find_outer_launch("auto", 1, environ, plugins) is None


def test_more_processes_than_there_are_tasks(plugins: PluginManager) -> None:
    with pytest.raises(ConfigError, match="there are 2 processes on this node already, and --nproc asks for 4"):
        find_outer_launch(4, 4, SRUN, plugins)
