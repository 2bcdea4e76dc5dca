"""Where the ranks meet: from `init_method`, the environment, or a store that is there already."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist

from fairlead.detect import choose_environment
from fairlead.errors import ConfigError
from fairlead.findings import raise_errors
from fairlead.interfaces import Topology
from fairlead.plugins import default_plugins
from fairlead.starts import Start
from fairlead_distributed import _environ
from fairlead_distributed.connecting import Endpoint, Opened, agree, connect
from fairlead_launch.ports import DEFAULT_PORT


def open_store(
    init_method: str,
    store: dist.Store | None,
    rank: int,
    world_size: int,
    *,
    start: Start | None,
    environ: Mapping[str, str],
    timeout: timedelta,
) -> tuple[Opened, Start | None]:
    """The store that all ranks share, and what the launcher says of this start.

    Args:
        init_method: As for `init_process_group`.
        store: A store that all ranks share, instead of what `init_method` says.
        rank: This rank.
        world_size: The number of ranks.
        start: What is known of this start; None asks the environment's plugins where they are needed.
        environ: The environment variables.
        timeout: How long to try.

    Raises:
        ConfigError: `init_method` is not understood, or nothing says where the ranks meet.
        PortError: Rank 0 cannot listen.
        RendezvousError: The address does not resolve or does not answer.
    """
    scheme, netloc, path = urlsplit(init_method)[:3]
    if scheme == "file" and path:
        return Opened(store or dist.FileStore(path, world_size), path), start
    if scheme == "env":
        if store is not None:
            return Opened(store, "the given store"), start
        if world_size == 1:
            return Opened(dist.HashStore(), "this process"), start
        endpoint, start = _from_environment(environ, world_size, start)
    elif scheme == "tcp" and ":" in netloc:
        parts = urlsplit(init_method)
        if parts.hostname is None or parts.port is None:
            raise ConfigError(f"no host and port in {init_method!r}", where="init_method", fix="write tcp://host:port")
        endpoint = Endpoint(parts.hostname, parts.port)
    else:
        raise ConfigError(
            f"init_method {init_method!r} is not understood",
            where="init_method",
            fix="use env://, tcp://host:port or file:///path",
        )
    if store is not None:
        return Opened(store, str(endpoint)), start
    if start is not None and start.ports:
        return agree(endpoint.host, start, rank=rank, world_size=world_size, timeout=timeout), start
    return connect(endpoint, rank=rank, world_size=world_size, environ=environ, timeout=timeout), start


def _from_environment(
    environ: Mapping[str, str], world_size: int, start: Start | None
) -> tuple[Endpoint, Start | None]:
    """MASTER_ADDR and MASTER_PORT; what they do not say, the scheduler does, where a plugin knows it."""
    address, port = environ.get("MASTER_ADDR", "").strip(), _environ.integer(environ, "MASTER_PORT")
    chosen = choose_environment("auto", environ, default_plugins(), starting=True)
    topology = chosen.topology
    if start is None and topology is not None:
        start = _start_of(topology, world_size)
    if address and port is not None:
        # Given, and used as it is, whatever the scheduler's plugin would have made of it.
        return Endpoint(address, port), start._replace(ports=()) if start is not None else None
    if topology is not None and topology.main_address is not None and topology.main_port is not None:
        return Endpoint(topology.main_address.value, topology.main_port.value), start
    if address:
        return Endpoint(address, DEFAULT_PORT), start
    raise_errors(chosen.findings)
    raise ConfigError(
        "MASTER_ADDR is not set: the processes do not know where to meet",
        where="environment, MASTER_ADDR",
        fix="set MASTER_ADDR to the name of the machine of rank 0 (127.0.0.1 when all are on one), or start with "
        "torchrun, which sets it; in a job of SLURM or LSF: pip install fairlead-environments, which finds it",
    )


def _start_of(topology: Topology, world_size: int) -> Start | None:
    start = topology.start
    counted = topology.world_size
    if start is None or (counted is not None and counted.value == world_size):
        return start
    return start._replace(hosts=(), rank_hosts=())  # the caller counts its ranks in another way than the scheduler
