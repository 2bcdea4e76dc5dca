"""Who a process of an MPI launcher is, without MPI; none names the node's index or the host of rank 0.

| launcher | rank, size | local rank, local size |
|---|---|---|
| Open MPI, Spectrum MPI | OMPI_COMM_WORLD_RANK, _SIZE | OMPI_COMM_WORLD_LOCAL_RANK, _LOCAL_SIZE |
| MPICH, Intel MPI (hydra) | PMI_RANK, PMI_SIZE | MPI_LOCALRANKID, MPI_LOCALNRANKS |
| MVAPICH | MV2_COMM_WORLD_RANK, _SIZE | MV2_COMM_WORLD_LOCAL_RANK, _LOCAL_SIZE |
| a PMIx server alone | PMIX_RANK, none | none |

OMPI_COMM_WORLD_NODE_RANK is *not* the node's index, but another local rank.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal, NamedTuple

from fairlead import Claim, EnvironmentConfigBase, Finding, Resolution, Specificity, Topology, hookimpl
from fairlead.errors import ConfigError
from fairlead.install import install_line
from fairlead.interfaces import Setting
from fairlead.topology import check_ranks
from fairlead.variables import integer, present, text
from fairlead_environments.passing_on import KILLED_SOON, check_mpirun
from fairlead_environments.shared import LaunchedEnvironment, MainAddressConfig, is_loopback
from fairlead_environments.slurm.topology import listed_nodes
from fairlead_environments.variables import given_address, meeting


class MPIEnvironmentConfig(MainAddressConfig):
    """Processes that `mpirun` or `mpiexec` started: Open MPI, MPICH, Intel MPI, MVAPICH.

    Detection reads variables only and never calls MPI_Init. MPI's launchers do not say on which
    host rank 0 is; on several nodes `main_address` comes from the scheduler or from Open MPI's
    contact address, else it has to be set, or queried from MPI itself with `use_mpi4py`.

    Example:
        >>> MPIEnvironmentConfig(main_address="n1").use_mpi4py
        False
    """

    name: Literal["mpi"] = "mpi"
    use_mpi4py: bool = False
    """Ask MPI for ranks, nodes, address and a free port when the run starts: calls MPI_Init, needs mpi4py."""


class MPI(LaunchedEnvironment):
    """Processes of `mpirun`."""

    config = MPIEnvironmentConfig
    runtime = "fairlead_environments.mpi_runtime:build"
    aliases = ("MPIEnvironmentPlugin",)
    extra = "mpi"
    example_environ: ClassVar[Mapping[str, str]] = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    codes: ClassVar[Mapping[str, str]] = {
        **LaunchedEnvironment.codes,
        **KILLED_SOON,
        "main-address-elsewhere": "Rank 0 is to listen on an address that belongs to another machine.",
    }

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Claims ranks of an MPI launcher, from its variables; never imports mpi4py."""
        launcher = _launcher(environ)
        if launcher is None:
            return None
        return Claim(f"{launcher.rank}={environ[launcher.rank].strip()}", Specificity.LAUNCHER)

    @hookimpl
    def fairlead_topology(self, config: EnvironmentConfigBase, environ: Mapping[str, str]) -> Topology:
        """As far as the launcher's variables tell it."""
        assert isinstance(config, MPIEnvironmentConfig)
        launcher = _launcher(environ)
        if launcher is None:
            if config.use_mpi4py:
                return Topology(launched=True)
            raise ConfigError(
                "no MPI launcher started this process",
                where="trainer.environment",
                why="OMPI_COMM_WORLD_RANK (Open MPI), PMI_RANK (MPICH, Intel MPI) and PMIX_RANK are not set",
                fix=f"start it with mpirun, or leave the environment out; {_ask()}",
            )
        world = _promised(config, environ, launcher.size, minimum=1)
        rank = _promised(config, environ, launcher.rank)
        local_rank = _promised(config, environ, launcher.local_rank)
        local = integer(environ, launcher.local_size, minimum=1) if launcher.local_size else None
        nodes = _num_nodes(world, local)
        asks = config.use_mpi4py and config.main_port is None
        port, start = (None, None) if asks else meeting(config.main_port, environ, _job(environ, launcher))
        node_rank = _node_rank(rank, local_rank, local, nodes)
        return check_ranks(
            Topology(
                launched=True,
                num_nodes=nodes,
                local_world_size=local,
                world_size=world,
                node_rank=node_rank,
                local_rank=local_rank,
                global_rank=rank,
                main_address=_main_address(config, environ, nodes),
                main_port=port,
                start=start,
            ),
            "mpirun",
        )

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """A main address on which rank 0 cannot listen, and what a stop would not survive."""
        yield from super().fairlead_check(resolution, environ)
        yield from check_mpirun(resolution, environ)
        address, rank = resolution.topology.main_address, resolution.topology.global_rank
        guessed = address is not None and address.reason.startswith(CONTACT)
        if address is not None and guessed and rank is not None and rank.value == 0 and not _is_here(address.value):
            yield Finding(
                "error",
                "main-address-elsewhere",
                f"rank 0 runs on {socket.gethostname()}, but the main address is {address.value}, another machine's",
                where=f"environment variable {CONTACT}",
                why="mpirun was started on a machine that has no rank 0",
                fix=f"set `environment.main_address: {socket.gethostname()}`",
            )


mpi = MPI()


CONTACT = "OMPI_MCA_orte_hnp_uri"
"""Open MPI 4's contact address of `mpirun`, `1234.0;tcp://10.0.0.1,10.1.0.1:40000`; the same for all ranks."""


def _ask() -> str:
    return f"`environment: {{name: mpi, use_mpi4py: true}}` asks MPI itself ({install_line('mpi')})"


class _Launcher(NamedTuple):
    job: tuple[str, ...]
    rank: str
    size: str = ""
    local_rank: str = ""
    local_size: str = ""


_NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_LAUNCHERS = (
    _Launcher(("PMIX_NAMESPACE", CONTACT), *(f"OMPI_COMM_WORLD_{name}" for name in _NAMES)),
    _Launcher(("PMI_ID",), *(f"MV2_COMM_WORLD_{name}" for name in _NAMES)),
    _Launcher(("PMI_JOBID",), "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Launcher(("PMIX_NAMESPACE",), "PMIX_RANK"),
)


def _launcher(environ: Mapping[str, str]) -> _Launcher | None:
    """What started this process, if not `srun` or `jsrun`, which set MPI's variables too."""
    if text(environ, "JSM_NAMESPACE_RANK") is not None:
        return None
    of_srun = text(environ, "SLURM_STEP_ID", "SLURM_STEPID") is not None
    for launcher in _LAUNCHERS:
        if text(environ, launcher.rank) is None:
            continue
        if launcher.rank == "PMI_RANK":
            # hydra starts its proxies with srun, so its ranks may see a step; only hydra sets the local rank.
            if present(environ, ("PMI_SIZE",)) and (not of_srun or text(environ, launcher.local_rank) is not None):
                return launcher
        elif launcher.rank == "PMIX_RANK":
            if not of_srun and text(environ, "PMIX_NAMESPACE") is not None:
                return launcher
        else:
            return launcher
    return None


def _promised(config: MPIEnvironmentConfig, environ: Mapping[str, str], name: str, minimum: int = 0) -> Setting | None:
    found = integer(environ, name, minimum=minimum) if name else None
    if found is None and not config.use_mpi4py:
        raise ConfigError(
            f"{name} is not set" if name else "this launcher sets PMIX_RANK only",
            where=f"environment variable {name or 'PMIX_RANK'}",
            why="without MPI, ranks and their number are known from the launcher's variables only",
            fix=_ask(),
        )
    return found


def _num_nodes(world: Setting | None, local: Setting | None) -> Setting | None:
    """Launchers do not say it; with the same number of ranks on each node it follows."""
    if world is None or local is None or world.value % local.value:
        return None
    if world.value == local.value:
        return Setting(1, f"all ranks are here: {local.reason}")
    return Setting(world.value // local.value, f"{world.reason} / {local.reason}, if all nodes have as many")


def _node_rank(
    rank: Setting | None, local_rank: Setting | None, local: Setting | None, nodes: Setting | None
) -> Setting | None:
    if rank is None or local_rank is None or local is None or nodes is None:
        return None
    if nodes.value == 1:
        return Setting(0, nodes.reason)
    if rank.value % local.value == local_rank.value:
        return Setting(rank.value // local.value, "ranks fill one node after the other")
    if rank.value // nodes.value == local_rank.value:
        return Setting(rank.value % nodes.value, "ranks go round the nodes")
    return None


def _main_address(config: MPIEnvironmentConfig, environ: Mapping[str, str], nodes: Setting | None) -> Setting | None:
    if config.use_mpi4py and config.main_address is None:
        return None
    given = given_address(config.main_address, environ)
    if given is not None:
        return given
    if nodes is not None and nodes.value == 1:
        return Setting("127.0.0.1", nodes.reason)
    return _from_slurm(environ) or _from_contact(environ) or _unknown_address()


def _from_slurm(environ: Mapping[str, str]) -> Setting | None:
    """mpirun fills the nodes of its allocation in order, even when it runs on the login node itself."""
    nodes = listed_nodes(environ, "SLURM_JOB_NODELIST")
    return None if nodes is None else Setting(nodes.value[0], f"first node of {nodes.reason}")


def _from_contact(environ: Mapping[str, str]) -> Setting | None:
    """The host of mpirun; right if rank 0 runs there, which `fairlead_check` looks at on rank 0."""
    found = text(environ, CONTACT)
    listed = re.search(r"tcp://([^:;]+):", found.value) if found is not None else None
    if found is None or listed is None:
        return None
    usable = [address for address in listed[1].split(",") if address and not is_loopback(address)]
    return Setting(usable[0], f"{CONTACT}, the host of mpirun") if usable else None


def _unknown_address() -> Setting:
    raise ConfigError(
        "the host of rank 0 is not known",
        where="environment variable MASTER_ADDR",
        why="the ranks are on several nodes, and this MPI launcher does not say where the first is",
        fix=f"`mpirun -x MASTER_ADDR=<host of rank 0>`, or set `environment.main_address`; or {_ask()}",
    )


def _job(environ: Mapping[str, str], launcher: _Launcher) -> dict[str, object]:
    """What tells this run of mpirun from others."""
    scheduler = text(environ, "SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "JOB_ID")
    run = text(environ, *launcher.job)
    found = {s.reason: s.value for s in (scheduler, run) if s is not None}
    return found or {"launcher": launcher.rank.removesuffix("_RANK")}


def _is_here(address: str) -> bool:
    """Whether this machine can listen on an address."""
    try:
        with socket.create_server((address, 0)):
            return True
    except OSError:
        return False
