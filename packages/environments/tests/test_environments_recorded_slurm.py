"""Every environment that was recorded on a real SLURM 22.05 (tests/recorded/slurm): claim and topology."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from fairlead import Topology
from fairlead.detect import ChosenEnvironment
from fairlead_environments import SLURMEnvironmentConfig
from fairlead_environments.slurm.topology import topology

Choose = Callable[[Mapping[str, str]], ChosenEnvironment]
Recorded = Callable[[str], dict[str, str]]
Ranks = Callable[[Topology], tuple[object, ...]]

NAMES = sorted(path.name for path in (Path(__file__).parent / "recorded" / "slurm").iterdir())

# nodes, ranks on this node, ranks in all, node rank, local rank, global rank
STEPS: dict[str, tuple[int, ...]] = {
    "het.srun-default.0": (1, 1, 1, 0, 0, 0),
    "het.srun.0": (3, 1, 5, 0, 0, 0),
    "het.srun.1": (3, 2, 5, 1, 0, 1),
    "het.srun.2": (3, 2, 5, 1, 1, 2),
    "het.srun.3": (3, 2, 5, 2, 0, 3),
    "het.srun.4": (3, 2, 5, 2, 1, 4),
    **{
        f"{job}.{rank}": (2, local_size, 4, node, local, rank)
        for job in ("salloc.srun", "srun.direct", "srun.pmix")
        for rank, (local_size, node, local) in enumerate([(3, 0, 0), (3, 0, 1), (3, 0, 2), (1, 1, 0)])
    },
    **{
        f"{job}.{rank}": (2, 2, 4, rank // 2, rank % 2, rank)
        for job in ("sbatch.srun", "sbatch.srun-gpt")
        for rank in range(4)
    },
}
ALLOCATIONS = {
    *(f"array.{task}" for task in range(4)),
    "het.batch",
    "salloc.shell",
    "sbatch.batch",
    "sbatch.requeued",
    "srun.pty",
}


def test_the_table_covers_every_recording() -> None:
    assert {*STEPS, *ALLOCATIONS} == set(NAMES)


@pytest.mark.parametrize("name", sorted(STEPS))
def test_a_task_of_a_step_is_slurm(name: str, recorded: Recorded, choose: Choose, ranks: Ranks) -> None:
    """No configuration, ranks and nodes from srun; also uneven, het, PMI2 and PMIx."""
    chosen = choose(recorded(f"slurm/{name}"))
    assert chosen.setting.value == "slurm"
    assert not chosen.findings
    assert chosen.inside_job
    assert chosen.topology is not None
    assert chosen.topology.launched
    assert ranks(chosen.topology) == STEPS[name]
    assert chosen.topology.main_address is not None
    assert chosen.topology.main_address.value == "n1"


@pytest.mark.parametrize("name", sorted(ALLOCATIONS))
def test_a_mere_allocation_is_not_slurm(name: str, recorded: Recorded, choose: Choose) -> None:
    """A batch script, a shell of salloc and `srun --pty bash` start one process, here on one machine."""
    chosen = choose(recorded(f"slurm/{name}"))
    assert chosen.setting.value == "lightning"
    assert {found.code for found in chosen.findings} <= {"allocation-unused"}
    assert chosen.topology is not None
    assert not chosen.topology.launched


@pytest.mark.parametrize(
    "job", ["het.srun", "salloc.srun", "srun.direct", "srun.pmix", "sbatch.srun", "sbatch.srun-gpt"]
)
def test_all_ranks_of_a_step_agree_on_the_meeting_point(job: str, recorded: Recorded, choose: Choose) -> None:
    topologies = [choose(recorded(f"slurm/{name}")).topology for name in NAMES if name.rpartition(".")[0] == job]
    assert len(topologies) in {4, 5}
    assert len({(t.main_address, t.main_port) for t in topologies if t is not None}) == 1


def test_two_steps_of_a_job_meet_on_different_ports(recorded: Recorded, choose: Choose) -> None:
    first, second = (choose(recorded(f"slurm/{name}")).topology for name in ("sbatch.srun.0", "sbatch.srun-gpt.0"))
    assert first is not None
    assert second is not None
    assert first.main_port is not None
    assert second.main_port is not None
    assert first.main_port.value != second.main_port.value
    assert "job 1, step 0, restart 0" in first.main_port.reason


def test_a_requeued_job_meets_on_another_port(recorded: Recorded) -> None:
    environ = recorded("slurm/sbatch.srun.0")
    ports = set()
    for count in ("0", "1", "2"):
        port = topology(SLURMEnvironmentConfig(), {**environ, "SLURM_RESTART_COUNT": count}).main_port
        assert port is not None
        assert 20000 <= port.value < 30000
        ports.add(port.value)
    assert len(ports) == 3


def test_a_step_smaller_than_its_job_is_what_counts(recorded: Recorded, ranks: Ranks) -> None:
    """`srun -N1 -n2` in a job of two nodes: two ranks, and the reason names both numbers."""
    environ = {
        **recorded("slurm/sbatch.srun.3"),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "n2",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "1",
    }
    found = topology(SLURMEnvironmentConfig(), environ)
    assert ranks(found) == (1, 2, 2, 0, 1, 1)
    assert found.main_address is not None
    assert found.main_address.value == "n2"
    assert found.num_nodes is not None
    assert found.num_nodes.reason == (
        "SLURM_STEP_NUM_NODES: the step; the job has SLURM_NNODES=2, SLURM_JOB_NUM_NODES=2"
    )


def test_old_releases_without_step_variables(recorded: Recorded, ranks: Ranks) -> None:
    environ = {k: v for k, v in recorded("slurm/srun.direct.3").items() if not k.startswith("SLURM_STEP_")}
    environ["SLURM_STEPID"] = "0"
    del environ["SLURM_NTASKS"]  # SLURM_NPROCS remains
    assert ranks(topology(SLURMEnvironmentConfig(), environ)) == (2, 1, 4, 1, 0, 3)


def test_the_config_overrides_the_meeting_point(recorded: Recorded) -> None:
    config = SLURMEnvironmentConfig(main_address="n1-ib", main_port=12355)
    found = topology(config, recorded("slurm/srun.direct.3"))
    assert found.main_address is not None
    assert found.main_port is not None
    assert (found.main_address.value, found.main_address.reason) == ("n1-ib", "environment.main_address")
    assert (found.main_port.value, found.main_port.reason) == (12355, "environment.main_port")


def test_an_exported_meeting_point_is_honoured(recorded: Recorded) -> None:
    environ = {**recorded("slurm/srun.direct.3"), "MASTER_ADDR": "n1-ib", "MASTER_PORT": "12355"}
    found = topology(SLURMEnvironmentConfig(), environ)
    assert found.main_address is not None
    assert found.main_port is not None
    assert (found.main_address.value, found.main_port.value) == ("n1-ib", 12355)
    assert found.main_port.reason == "MASTER_PORT"


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("SLURM_PROCID", "x", "SLURM_PROCID is 'x', which is not an integer"),
        ("SLURM_PROCID", "4", "4 (SLURM_PROCID) does not go with 4 (SLURM_STEP_NUM_TASKS"),
        ("SLURM_LOCALID", None, "SLURM_LOCALID is not set"),
        ("SLURM_LOCALID", "-1", "SLURM_LOCALID is '-1'"),
        ("SLURM_NODEID", "2", "SLURM_STEP_TASKS_PER_NODE is '3,1'"),
        ("SLURM_STEP_TASKS_PER_NODE", "3,2", "5 tasks on 2 nodes; expected 4 tasks"),
        ("SLURM_STEP_TASKS_PER_NODE", "3(1)", "is not a list of tasks per node"),
        ("SLURM_STEP_NODELIST", "n[1-2", "SLURM_STEP_NODELIST is 'n[1-2', which is not a list of hosts"),
        ("MASTER_PORT", "99999", "MASTER_PORT is '99999', which is not a TCP port"),
    ],
)
def test_a_broken_promise_is_named(
    variable: str, value: str | None, told: str, recorded: Recorded, choose: Choose
) -> None:
    """A malformed or absent variable is a finding that names it, its value, and what it should be."""
    environ = recorded("slurm/srun.direct.3")
    if value is None:
        del environ[variable]
    else:
        environ[variable] = value
    chosen = choose(environ)
    assert chosen.setting.value == "slurm"
    assert [finding.severity for finding in chosen.findings] == ["error"]
    assert told in chosen.findings[0].what
    assert chosen.findings[0].fix
