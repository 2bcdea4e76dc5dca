"""What the environments say before a run would hang or waste an allocation."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import cast

import pytest

from fairlead import Finding, PluginManager, Resolution
from fairlead.detect import choose_environment
from fairlead.plugin_classes import EnvironmentPlugin
from fairlead_environments.mpi import CONTACT

Recorded = Callable[[str], dict[str, str]]


def findings(environ: Mapping[str, str], plugins: PluginManager) -> list[Finding]:
    """What is said of an allocation, and by the chosen environment's own check."""
    chosen = choose_environment("auto", environ, plugins)
    assert {finding.code for finding in chosen.findings} <= {"allocation-unused"}, chosen.findings
    assert chosen.topology is not None
    plugin = plugins.get("environment", chosen.setting.value)
    assert isinstance(plugin, EnvironmentPlugin)
    resolution = cast("Resolution", SimpleNamespace(topology=chosen.topology, environment=chosen.config))
    (found,) = plugins.call(plugin, "fairlead_check", resolution=resolution, environ=environ)
    made = list(found)
    assert {finding.code for finding in made} <= set(plugin.codes)
    return [*chosen.findings, *made]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("slurm/sbatch.batch", "SLURM allocated 2 nodes (SLURM_JOB_NUM_NODES) and 4 tasks (SLURM_NTASKS)"),
        ("slurm/salloc.shell", "SLURM allocated 2 nodes (SLURM_JOB_NUM_NODES) and 4 tasks (SLURM_NTASKS)"),
        ("slurm/srun.pty", None),
        ("slurm/array.0", None),
        ("slurm/sbatch.requeued", None),
    ],
)
def test_an_allocation_that_would_idle_is_named(
    name: str, told: str | None, recorded: Recorded, plugins: PluginManager
) -> None:
    """FIELD.md, pain 5: plain `python train.py` in a batch script of two nodes uses one process of one node."""
    made = findings(recorded(name), plugins)
    assert [finding.code for finding in made] == (["allocation-unused"] if told else [])
    assert not told or made[0].what.startswith(told)
    assert not told or "srun" in str(made[0].fix)


@pytest.mark.parametrize(
    ("environ", "code"),
    [
        ({"LSB_JOBID": "1", "LSB_HOSTS": "h1 h1 h2 h2"}, "allocation-unused"),
        ({"LSB_JOBID": "1", "LSB_HOSTS": "h1 h1 h1 h1"}, None),
        ({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "h1 x"}, None),
        ({"PET_RDZV_ENDPOINT": "job-worker-0:23456", "PET_NNODES": "2:4"}, "allocation-unused"),
        ({"PET_RDZV_ENDPOINT": "job-worker-0:23456", "PET_NNODES": "1"}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "four"}, None),
        ({"NODE_RANK": "1"}, "node-rank-ignored"),
        ({"NODE_RANK": "0"}, None),
        ({}, None),
    ],
)
def test_one_machine_that_should_be_several(environ: dict[str, str], code: str | None, plugins: PluginManager) -> None:
    assert [finding.code for finding in findings(environ, plugins)] == ([code] if code else [])


@pytest.mark.parametrize(
    ("address", "severities"), [("localhost", ["error"]), ("127.0.0.1", ["error"]), ("::1", ["error"]), ("n1", [])]
)
def test_a_loopback_address_for_several_nodes(
    address: str, severities: list[str], recorded: Recorded, plugins: PluginManager
) -> None:
    """`export MASTER_ADDR=localhost` in a batch script of two nodes would hang until the time-out."""
    made = findings({**recorded("slurm/srun.direct.3"), "MASTER_ADDR": address}, plugins)
    assert [finding.severity for finding in made] == severities


def test_two_nodes_by_hand_on_one_machine_are_a_warning(plugins: PluginManager) -> None:
    environ = {"MASTER_ADDR": "localhost", "NODE_RANK": "1", "NNODES": "2"}
    assert [finding.severity for finding in findings(environ, plugins)] == ["warning"]


def test_rank_0_away_from_mpirun_is_named(plugins: PluginManager) -> None:
    """The contact address of mpirun is a login node's; 192.0.2.1 (RFC 5737) is no machine's."""
    names = {"SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "2", "RANK": "0"}
    environ = {f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()}
    environ[CONTACT] = "1.0;tcp://192.0.2.1:4000"
    (made,) = findings(environ, plugins)
    assert (made.severity, made.code) == ("error", "main-address-elsewhere")
    assert socket.gethostname() in made.what
    assert not findings({**environ, "OMPI_COMM_WORLD_RANK": "2"}, plugins)
