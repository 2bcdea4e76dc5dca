"""With `use_mpi4py`, the ranks ask MPI who and where they are; else the launcher's variables tell."""

from __future__ import annotations

import importlib
import socket
from typing import Any

from fairlead.errors import ConfigError, MissingDependencyError
from fairlead.install import install_line
from fairlead.interfaces import BuildContext
from fairlead_environments.mpi import MPIEnvironmentConfig
from fairlead_environments.runtime import ResolvedEnvironment
from fairlead_environments.runtime import build as build_resolved


def build(config: MPIEnvironmentConfig, context: BuildContext) -> ResolvedEnvironment:
    """The environment of this rank."""
    if not config.use_mpi4py:
        return build_resolved(config, context)
    environment = exchange(config, _mpi().COMM_WORLD, socket.gethostname())
    if environment.world_size() != context.resolution.world_size:
        raise ConfigError(
            f"MPI started {environment.world_size()} ranks, but the run is for {context.resolution.world_size}",
            where="trainer.devices",
            why=f"world_size: {context.resolution.settings['world_size'].reason}",
            fix=f"start it with `mpirun -n {context.resolution.world_size}`, or change `devices` and `num_nodes`",
        )
    return environment


def _mpi() -> Any:
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py found no MPI library
        raise MissingDependencyError(
            "`use_mpi4py` needs mpi4py and an MPI library",
            where="trainer.environment.use_mpi4py",
            why=str(error),
            fix=f"{install_line('mpi')}, and load the MPI module that mpirun comes from",
        ) from error


def exchange(config: MPIEnvironmentConfig, world: Any, hostname: str) -> ResolvedEnvironment:
    """Ranks, nodes and the meeting point from one exchange between all ranks over `mpi4py.MPI.COMM_WORLD`."""
    rank = world.Get_rank()
    from fairlead_distributed import free_port  # comes with the engines

    offer = (hostname, free_port("") if rank == 0 else 0)
    offers = world.allgather(offer)
    hosts = [host for host, _ in offers]
    nodes = list(dict.fromkeys(hosts))
    return ResolvedEnvironment(
        launched=True,
        main_address=config.main_address or hosts[0],
        main_port=config.main_port or offers[0][1],
        world_size=len(hosts),
        global_rank=rank,
        local_rank=hosts[:rank].count(hostname),
        node_rank=nodes.index(hostname),
        num_nodes=len(nodes),
        local_world_size=hosts.count(hostname),
    )
