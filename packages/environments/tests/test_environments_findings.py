"""What the environments say before a run would hang or waste an allocation."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fairlead import Finding, PluginManager, Resolution, TrainerConfig
from fairlead.checks import check_trainer
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
    resolution = cast("Resolution", SimpleNamespace(topology=chosen.topology, environment=chosen.config, job=None))
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
        ({"GROUP_RANK": "1"}, "node-rank-ignored"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "node-rank-ignored"),
        ({"NNODES": "2", "MASTER_ADDR": "n1"}, "node-rank-ignored"),
        ({"NODE_RANK": "0", "NNODES": "1"}, None),
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


@pytest.mark.parametrize(
    ("exported", "devices", "nodes", "told"),
    [
        ("MASTER_ADDR=n1 MASTER_PORT=12355 WORLD_SIZE=8 NODE_RANK=1", 4, 2, []),
        ("MASTER_ADDR=n1 MASTER_PORT=12355 WORLD_SIZE=8 GROUP_RANK=1", 4, 2, []),
        ("MASTER_ADDR=localhost WORLD_SIZE=4 NODE_RANK=0", 2, 2, ["warning main-address-loopback"]),
        ("MASTER_ADDR=n1 WORLD_SIZE=9 NODE_RANK=1", 4, 1, ["error world-size-contradicted"]),
        (
            "MASTER_ADDR=n1 WORLD_SIZE=8 NNODES=2 NODE_RANK=1",
            2,
            2,
            ["warning launch-mismatch", "error world-size-contradicted"],
        ),
        ("MASTER_ADDR=n1 WORLD_SIZE=8", 2, 1, ["error world-size-contradicted"]),
        ("WORLD_SIZE=8", 2, 1, ["error world-size-contradicted"]),
        ("WORLD_SIZE=two", 2, 1, ["error world-size-contradicted"]),
        ("WORLD_SIZE=2", 2, 1, []),
    ],
)
def test_world_size_is_believed_or_contradicted(
    exported: str, devices: int, nodes: int, told: list[str], plugins: PluginManager
) -> None:
    """Four exported variables, and each node trained alone and ended with 0."""
    environ = dict(word.split("=") for word in exported.split())
    config = TrainerConfig.model_validate({"accelerator": "cpu", "devices": devices}, context={"plugins": plugins})
    resolution, found = check_trainer(config, environ=environ, plugins=plugins)
    assert (resolution.num_nodes, resolution.world_size) == (nodes, nodes * devices)
    assert [f"{one.severity} {one.code}" for one in found if one.code != "oversubscribed"] == told


@pytest.mark.parametrize(
    ("name", "exported", "told"),
    [
        ("slurm/srun.direct.3", "2", ["warning"]),
        ("slurm/srun.direct.3", "4", []),
        ("kubeflow", "2", []),
    ],
)
def test_a_launcher_knows_better_than_world_size(
    name: str, exported: str, told: list[str], recorded: Recorded, plugins: PluginManager
) -> None:
    """A batch script's own `export WORLD_SIZE=...`; a PyTorchJob counts its pods there."""
    pods = "KUBERNETES_PORT=1 MASTER_ADDR=a MASTER_PORT=1 RANK=1 PET_NNODES=2 PET_NPROC_PER_NODE=auto"
    environ = dict(word.split("=") for word in pods.split()) if name == "kubeflow" else recorded(name)
    config = TrainerConfig.model_validate({"accelerator": "cpu"}, context={"plugins": plugins})
    resolution, found = check_trainer(config, environ={**environ, "WORLD_SIZE": exported}, plugins=plugins)
    assert [one.severity for one in found if one.code == "world-size-contradicted"] == told
    assert resolution.num_nodes == 2


def test_rank_0_away_from_mpirun_is_named(plugins: PluginManager) -> None:
    """The contact address of mpirun is a login node's; 192.0.2.1 (RFC 5737) is no machine's."""
    names = {"SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "2", "RANK": "0"}
    environ = {f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()}
    environ[CONTACT] = "1.0;tcp://192.0.2.1:4000"
    (made,) = findings(environ, plugins)
    assert (made.severity, made.code) == ("error", "main-address-elsewhere")
    assert socket.gethostname() in made.what
    assert not findings({**environ, "OMPI_COMM_WORLD_RANK": "2"}, plugins)


TORCHRUN = "TORCHELASTIC_RUN_ID=1 RANK=0 LOCAL_RANK=0 GROUP_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 GROUP_WORLD_SIZE=1"
MPIRUN = "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2"
LOST = "nothing would be saved, and the job not restarted"
PASSING = "TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGUSR1"


@pytest.mark.parametrize(
    ("variables", "settings", "said"),
    [
        (TORCHRUN, {}, "torchrun ends at SIGUSR1 and SIGUSR2: nothing would be saved, and the job not restarted"),
        (
            f"{TORCHRUN} {PASSING}",
            {},
            "torchrun ends at SIGUSR2: nothing would be saved, and the job not restarted",
        ),
        (f"{TORCHRUN} {PASSING}", {"requeue": {"name": "slurm", "signals": ["SIGUSR1"]}}, None),
        (TORCHRUN, {"requeue": "none"}, None),
        (MPIRUN, {}, "mpirun kills its ranks 1 s after a SIGTERM, as at a preemption: too soon to save"),
        (f"{MPIRUN} OMPI_MCA_odls_base_sigkill_timeout=60", {}, None),
    ],
)
def test_what_a_launcher_does_not_pass_on_is_said(
    variables: str, settings: dict[str, Any], said: str | None, plugins: PluginManager
) -> None:
    """In a job of a scheduler; on a workstation nobody sends such signals."""
    environ = dict(word.split("=", 1) for word in f"{variables} MASTER_ADDR=127.0.0.1 MASTER_PORT=29500".split())
    config = TrainerConfig.model_validate({"accelerator": "cpu", **settings}, context={"plugins": plugins})
    codes = {"signals-not-passed-on", "mpirun-kills-soon"}
    for job in ({"SLURM_JOB_ID": "7"}, {}):
        _, found = check_trainer(config, environ={**environ, **job}, plugins=plugins)
        made = [one.what for one in found if one.code in codes]
        assert made == ([said] if said is not None and job else [])
