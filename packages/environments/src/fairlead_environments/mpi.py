"""Who a process of an MPI launcher is, without MPI.

| launcher | rank, size | local rank, local size |
|---|---|---|
| Open MPI, Spectrum MPI | OMPI_COMM_WORLD_RANK, _SIZE | OMPI_COMM_WORLD_LOCAL_RANK, _LOCAL_SIZE |
| MPICH, Intel MPI (hydra) | PMI_RANK, PMI_SIZE | MPI_LOCALRANKID, MPI_LOCALNRANKS |
| MVAPICH | MV2_COMM_WORLD_RANK, _SIZE | MV2_COMM_WORLD_LOCAL_RANK, _LOCAL_SIZE |
| a PMIx server alone | PMIX_RANK, none | none |

OMPI_COMM_WORLD_NODE_RANK is *not* the node's index, but another local rank. No launcher names the
node's index or the host of rank 0.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from fairlead import Claim, EnvironmentConfigBase, Finding, Resolution, Specificity, Topology, hookimpl
from fairlead.errors import ConfigError
from fairlead.interfaces import Setting
from fairlead_environments.shared import LaunchedEnvironment, MainAddressConfig, is_loopback
from fairlead_environments.slurm.hostlist import expand
from fairlead_environments.variables import check_ranks, given_address, integer, malformed, meeting, present, text


class MPIEnvironmentConfig(MainAddressConfig):
    """Processes that `mpirun` or `mpiexec` started: Open MPI, MPICH, Intel MPI, MVAPICH.

    Detection reads variables only and never calls MPI_Init. MPI's launchers do not say on which
    host rank 0 is; on several nodes `main_address` comes from the scheduler or from Open MPI's
    contact address, else it has to be set, or asked of MPI itself with `use_mpi4py`.

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
    codes: ClassVar[Mapping[str, str]] = {
        **LaunchedEnvironment.codes,
        "main-address-elsewhere": "Rank 0 is to listen on an address that belongs to another machine.",
    }

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Claims ranks of an MPI launcher, from its variables; never imports mpi4py."""
        evidence = find_launcher(environ)
        return None if evidence is None else Claim(evidence, Specificity.LAUNCHER)

    @hookimpl
    def fairlead_topology(self, config: EnvironmentConfigBase, environ: Mapping[str, str]) -> Topology:
        """As far as the launcher's variables tell it."""
        assert isinstance(config, MPIEnvironmentConfig)
        return topology(config, environ)

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """A main address on which rank 0 cannot listen."""
        yield from super().fairlead_check(resolution, environ)
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

_ASK = "`environment: {name: mpi, use_mpi4py: true}` asks MPI itself (pip install 'fairlead[mpi]')"


@dataclass(frozen=True)
class _Launcher:
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...]


_LAUNCHERS = (
    _Launcher(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", CONTACT),
    ),
    _Launcher(
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        ("PMI_ID",),
    ),
    _Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_JOBID",)),
    _Launcher("PMIX_RANK", "", "", "", ("PMIX_NAMESPACE",)),
)


def find_launcher(environ: Mapping[str, str]) -> str | None:
    """The evidence that an MPI launcher started this process; None when none did.

    `srun --mpi=pmi2` and `--mpi=pmix` set PMI_ and PMIX_ variables as well; those are SLURM's tasks.
    `jsrun` sets Spectrum MPI's OMPI_ variables; those are LSF's.
    """
    launcher = _launcher(environ)
    return None if launcher is None else f"{launcher.rank}={environ[launcher.rank].strip()}"


def _launcher(environ: Mapping[str, str]) -> _Launcher | None:
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


def topology(config: MPIEnvironmentConfig, environ: Mapping[str, str]) -> Topology:
    """The topology of this process, as far as variables tell it.

    Raises:
        ConfigError: A variable is absent or malformed, or on several nodes nothing tells the main
            address; with `use_mpi4py`, what is absent is left to MPI.
    """
    launcher = _launcher(environ)
    if launcher is None:
        if config.use_mpi4py:
            return Topology(launched=True)
        raise ConfigError(
            "no MPI launcher started this process",
            where="trainer.environment",
            why="OMPI_COMM_WORLD_RANK (Open MPI), PMI_RANK (MPICH, Intel MPI) and PMIX_RANK are not set",
            fix=f"start it with mpirun, or leave the environment out; {_ASK}",
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


def _promised(config: MPIEnvironmentConfig, environ: Mapping[str, str], name: str, minimum: int = 0) -> Setting | None:
    found = integer(environ, name, minimum=minimum) if name else None
    if found is None and not config.use_mpi4py:
        missing = name or "the number of ranks"
        raise ConfigError(
            f"{missing} is not set" if name else "this launcher sets PMIX_RANK only",
            where=f"environment variable {name or 'PMIX_RANK'}",
            why="without MPI, ranks and their number are known from the launcher's variables only",
            fix=_ASK,
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
    found = text(environ, "SLURM_JOB_NODELIST")
    if found is None:
        return None
    try:
        hosts = expand(found.value)
    except ValueError as error:
        raise malformed(found.reason, found.value, "a list of hosts such as n[1-2]") from error
    return Setting(hosts[0], f"first node of {found.reason}") if hosts else None


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
        fix=f"`mpirun -x MASTER_ADDR=<host of rank 0>`, or set `environment.main_address`; or {_ASK}",
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
