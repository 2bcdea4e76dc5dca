"""What `mpi` contributes."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from typing import ClassVar

from fairlead import (
    Claim,
    EnvironmentConfigBase,
    EnvironmentPlugin,
    Finding,
    Resolution,
    Specificity,
    Topology,
    hookimpl,
)
from fairlead_environments.checks import LOOPBACK_CODES, loopback_address
from fairlead_environments.fields import LIGHTNING
from fairlead_environments.mpi.config import MPIEnvironmentConfig
from fairlead_environments.mpi.topology import CONTACT, find_launcher, topology

__all__ = ["MPI", "mpi"]


class MPI(EnvironmentPlugin):
    """Processes of `mpirun`."""

    config = MPIEnvironmentConfig
    runtime = "fairlead_environments.mpi.runtime:build"
    aliases = ("MPIEnvironmentPlugin",)
    engines = LIGHTNING
    extra = "mpi"
    codes: ClassVar[Mapping[str, str]] = {
        **LOOPBACK_CODES,
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
        yield from loopback_address(resolution)
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


def _is_here(address: str) -> bool:
    """Whether this machine can listen on an address."""
    try:
        with socket.create_server((address, 0)):
            return True
    except OSError:
        return False


mpi = MPI()
