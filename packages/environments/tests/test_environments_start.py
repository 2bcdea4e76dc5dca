"""What the ranks of one start know alike before they meet: candidates of a port, and who runs where."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fairlead import FairleadError, Topology
from fairlead.starts import Start
from fairlead_environments import (
    LSFEnvironmentConfig,
    ManualEnvironmentConfig,
    MPIEnvironmentConfig,
    SLURMEnvironmentConfig,
)
from fairlead_environments.lsf.topology import topology as lsf_topology
from fairlead_environments.manual import manual
from fairlead_environments.mpi import mpi
from fairlead_environments.slurm.topology import topology as slurm_topology
from fairlead_environments.variables import PORTS, candidate_ports

Recorded = Callable[[str], dict[str, str]]
JSRUN = {
    "LSB_JOBID": "5",
    "LSB_HOSTS": "batch h1 h1 h2 h2",
    "JSM_NAMESPACE_RANK": "1",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "312",
}


def start_of(topology: Topology) -> Start:
    assert topology.start is not None
    return topology.start


def slurm(environ: dict[str, str], **config: object) -> Topology:
    return slurm_topology(SLURMEnvironmentConfig(**config), environ)  # type: ignore[arg-type]


def test_the_candidates_are_distinct_and_below_the_kernels_own() -> None:
    for job in range(500):
        ports = candidate_ports(f"job {job}, step 0, restart 0")
        assert len(set(ports)) == len(ports) == 16
        assert all(port in PORTS for port in ports)


@pytest.mark.parametrize(
    ("step", "size"),
    [("sbatch.srun", 4), ("srun.direct", 4), ("het.srun", 5), ("srun.pmix", 4), ("sbatch.srun-gpt", 4)],
)
def test_all_ranks_of_a_slurm_step_know_the_same(recorded: Recorded, step: str, size: int) -> None:
    """On recorded steps: also of a heterogeneous job, and of nodes with unequal numbers of tasks."""
    topologies = [slurm(recorded(f"slurm/{step}.{rank}")) for rank in range(size)]
    starts = {start_of(topology) for topology in topologies}
    assert len(starts) == 1
    (start,) = starts
    assert {topology.main_port.value for topology in topologies if topology.main_port} == {start.ports[0]}
    nodes = [topology.node_rank.value for topology in topologies if topology.node_rank]
    assert [start.rank_hosts[rank] for rank in range(size)] == [start.hosts[node] for node in nodes]


def test_other_jobs_steps_restarts_and_array_tasks_have_other_ports(recorded: Recorded) -> None:
    environ = recorded("slurm/sbatch.srun.0")
    # Each task of an array is a job with a number of its own.
    tasks = [{"SLURM_JOB_ID": recorded(f"slurm/array.{task}")["SLURM_JOB_ID"]} for task in range(4)]
    changes = [{}, {"SLURM_STEP_ID": "5"}, {"SLURM_RESTART_COUNT": "1"}, *tasks]
    starts = [start_of(slurm({**environ, **change})) for change in changes]
    assert len({start.identity for start in starts}) == len({start.ports for start in starts}) == 7


@pytest.mark.parametrize(
    ("counts", "node", "here", "expected"),
    [
        ("2(x2)", "0", "0,1", ("n1", "n1", "n2", "n2")),
        ("2(x2)", "0", "0,2", ("n1", "n2", "n1", "n2")),
        ("3,1", "0", "0,2,3", ("n1", "n2", "n1", "n1")),
        ("1(x2)", "1", "1", ("n1", "n2")),
        ("2(x2)", "0", "0,3", ()),  # an arbitrary distribution
        ("2(x2)", "0", "", ()),
    ],
)
def test_who_runs_where_is_told_only_where_it_is_known(
    recorded: Recorded, counts: str, node: str, here: str, expected: tuple[str, ...]
) -> None:
    total = {"2(x2)": "4", "3,1": "4", "1(x2)": "2"}[counts]
    environ = {
        **recorded("slurm/sbatch.srun.0"),
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_STEP_NUM_TASKS": total,
        "SLURM_NODEID": node,
        "SLURM_PROCID": here.partition(",")[0] or "0",
        "SLURM_LOCALID": "0",
        "SLURM_GTIDS": here,
    }
    assert start_of(slurm(environ)).rank_hosts == expected


def test_a_port_that_was_given_has_no_candidates(recorded: Recorded) -> None:
    """It is used as it is; what else is known of the start stays."""
    environ = recorded("slurm/sbatch.srun.0")
    for found in (slurm({**environ, "MASTER_PORT": "12355"}), slurm(environ, main_port=12355)):
        assert found.main_port is not None
        assert found.main_port.value == 12355
        start = start_of(found)
        assert start.ports == ()
        assert start.hosts == ("n1", "n2")
        assert start.identity == "job 1, step 0, restart 0"


def test_the_reason_says_that_others_follow(recorded: Recorded) -> None:
    port = slurm(recorded("slurm/sbatch.srun.0")).main_port
    assert port is not None
    assert port.reason.startswith("the first free one of 16 ports derived from job 1, step 0, restart 0")


def test_lsf() -> None:
    jsrun = lsf_topology(LSFEnvironmentConfig(), JSRUN, "h1")
    assert start_of(jsrun).hosts == ("h1", "h2")
    assert start_of(jsrun).rank_hosts == ()  # resource sets decide
    other = lsf_topology(LSFEnvironmentConfig(), {**JSRUN, "PMIX_NAMESPACE": "2"}, "h1")
    assert start_of(other).ports != start_of(jsrun).ports
    blaunch = {"LSB_JOBID": "5", "LSB_HOSTS": "h1 h1 h2", "LSF_PM_TASKID": "3"}
    assert start_of(lsf_topology(LSFEnvironmentConfig(), blaunch, "h2")).rank_hosts == ("h1", "h1", "h2")


def test_mpi() -> None:
    start = start_of(mpi.fairlead_topology(MPIEnvironmentConfig(), OPEN_MPI))
    assert start.identity == "PMIX_NAMESPACE 312"
    assert len(start.ports) == 16
    assert start_of(mpi.fairlead_topology(MPIEnvironmentConfig(main_port=12355), OPEN_MPI)).ports == ()
    assert mpi.fairlead_topology(MPIEnvironmentConfig(use_mpi4py=True), OPEN_MPI).start is None  # MPI chooses the port


def test_a_start_by_hand_tries_one_port() -> None:
    """29500 by torch's convention; who starts by hand may have opened just that one."""
    found = manual.fairlead_topology(ManualEnvironmentConfig(), {"MASTER_ADDR": "a", "NODE_RANK": "0"})
    assert found.start is None
    assert found.main_port is not None
    assert found.main_port.value == 29500
    with pytest.raises(FairleadError, match="a TCP port"):
        manual.fairlead_topology(
            ManualEnvironmentConfig(), {"MASTER_ADDR": "a", "NODE_RANK": "0", "MASTER_PORT": "70000"}
        )
