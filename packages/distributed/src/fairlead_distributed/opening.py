"""Where the ranks meet: a store that is there already, or at an address that `init_method` or the environment names."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

import torch.distributed as dist

from fairlead.detect import choose_environment
from fairlead.errors import ConfigError
from fairlead.findings import raise_errors
from fairlead.install import install_line
from fairlead.interfaces import Topology
from fairlead.plugins import default_plugins
from fairlead.starts import Start
from fairlead_distributed import _environ
from fairlead_distributed.alarms import SlowWait
from fairlead_distributed.errors import AddressNotFoundError, AddressUnreachableError
from fairlead_distributed.listener import StartListener, find_store, why_unreached
from fairlead_distributed.store import tcp_store
from fairlead_distributed.threads import within
from fairlead_launch.ports import DEFAULT_PORT, PortError, bind_listener


class Endpoint(NamedTuple):
    """Where the store of a run is: the address and port of its master."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Opened(NamedTuple):
    """A store that all ranks share, and its address for messages; once closed, nobody else finds it any more."""

    store: dist.Store
    where: str
    close: Callable[[], None] = lambda: None


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
    """The store that all ranks share, and what the launcher says of this start, or its plugin where it is not given."""
    method = urlsplit(init_method)
    if method.scheme == "file" and method.path:
        return Opened(store or dist.FileStore(method.path, world_size), method.path), start
    if method.scheme == "env":
        if store is not None:
            return Opened(store, "the given store"), start
        if world_size == 1:
            return Opened(dist.HashStore(), "this process"), start
        endpoint, start = _from_environment(environ, world_size, start)
    elif method.scheme == "tcp" and method.hostname is not None and method.port is not None:
        endpoint = Endpoint(method.hostname, method.port)
    else:
        raise ConfigError(
            f"init_method {init_method!r} is not understood",
            where="init_method",
            fix="use env://, tcp://host:port or file:///path",
        )
    if store is not None:
        return Opened(store, str(endpoint)), start
    if start is not None and start.ports:
        return _agree(endpoint.host, start, rank=rank, world_size=world_size, timeout=timeout), start
    return _connect(endpoint, rank=rank, world_size=world_size, environ=environ, timeout=timeout), start


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
        f"torchrun, which sets it; in a job of SLURM or LSF: {install_line('check')}, which finds it",
    )


def _start_of(topology: Topology, world_size: int) -> Start | None:
    start = topology.start
    counted = topology.world_size
    if start is None or (counted is not None and counted.value == world_size):
        return start
    return start._replace(hosts=(), rank_hosts=())  # the caller counts its ranks in another way than the scheduler


def _agree(host: str, start: Start, *, rank: int, world_size: int, timeout: timedelta) -> Opened:
    """The store of ranks that were given no port: rank 0 takes free ones, the others look for it on `start.ports`."""
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        _raise_file_limit(world_size)
        store = tcp_store(bind_listener([0]), timeout=timeout)
        listener = StartListener(start.identity, start.ports, store.port)
        return Opened(store, str(Endpoint(host, listener.port)), listener.close)
    found = find_store(host, start.ports, start.identity, rank=rank, timeout=timeout.total_seconds())
    return Opened(_client(Endpoint(*found), rank, "rank 0", deadline), str(Endpoint(host, found[1])))


def _connect(
    endpoint: Endpoint, *, rank: int, world_size: int, environ: Mapping[str, str], timeout: timedelta
) -> Opened:
    """The store at a port that was given: hosted by rank 0, or by torchrun's agent when it says so."""
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0 and not agent:
        _raise_file_limit(world_size)
        return Opened(_host(endpoint, timeout), str(endpoint))
    name = "torchrun's agent" if agent else "rank 0"
    address = _await_listener(endpoint, rank, name, deadline)
    return Opened(_client(Endpoint(address, endpoint.port), rank, name, deadline), str(endpoint))


def _raise_file_limit(world_size: int) -> None:
    """The store has five open connections of each rank once a run trains, a few more at times; 1024 files are usual."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1024 + 8 * world_size
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))


def _host(endpoint: Endpoint, timeout: timedelta) -> dist.TCPStore:
    try:
        return dist.TCPStore(
            "localhost",  # for its own connection; it listens on all addresses
            endpoint.port,
            is_master=True,
            wait_for_workers=False,  # `meet` waits, and can name who is missing
            multi_tenant=True,
            timeout=timeout,
        )
    except dist.DistNetworkError as error:
        in_use = "EADDRINUSE" in str(error)
        raise PortError(
            f"rank 0 cannot listen on port {endpoint.port} of {socket.gethostname()}"
            + (": it is in use" if in_use else ""),
            where=f"MASTER_PORT={endpoint.port}, MASTER_ADDR={endpoint.host}",
            why="another run, or an earlier one that has not ended" if in_use else str(error).splitlines()[0],
            fix=f"give another port to all ranks (MASTER_PORT={endpoint.port + 1}), from 1024 on, or end what "
            f"holds it: ss -ltnp 'sport = :{endpoint.port}'; in a job of SLURM, LSF or mpirun leave MASTER_PORT and "
            "`environment.main_port` out, and the ranks take a free one",
        ) from error


def _client(endpoint: Endpoint, rank: int, name: str, deadline: float) -> dist.Store:
    """A connection to a store; bounded, which torch's own is not where something else listens."""
    seconds = max(0.05, _seconds(deadline))
    connect_to = partial(dist.TCPStore, endpoint.host, endpoint.port, is_master=False, wait_for_workers=False)
    try:
        return within(seconds + 1.0, partial(connect_to, timeout=timedelta(seconds=seconds)))
    except (dist.DistNetworkError, TimeoutError) as error:
        raise AddressUnreachableError(
            f"what listens at {endpoint} is not the store of {name}",
            where=f"rank {rank}, on {socket.gethostname()}",
            why=str(error).splitlines()[0],
            fix=f"see what listens there (`ss -ltnp 'sport = :{endpoint.port}'` on that machine), and give all ranks "
            "another port (MASTER_PORT)",
        ) from error


def _await_listener(endpoint: Endpoint, rank: int, name: str, deadline: float) -> str:
    """The address that answers, in numbers: torch connects to the same machine, and asks no name server again."""
    # A plain connect tells "name unknown", "refused" and "no answer" apart; the store's own client says one thing.
    started, pause = time.monotonic(), 0.02
    slow = SlowWait(lambda: _waiting_line(rank, name, endpoint, deadline))
    while True:
        try:
            patience = min(5.0, max(0.1, _seconds(deadline)))
            with socket.create_connection((endpoint.host, endpoint.port), timeout=patience) as connection:
                return str(connection.getpeername()[0])
        except OSError as error:
            if _seconds(deadline) <= pause:
                unknown = isinstance(error, socket.gaierror)
                failure = (AddressNotFoundError if unknown else AddressUnreachableError)(
                    f"rank {rank} could not reach {name} at {endpoint} within {time.monotonic() - started:.0f} s",
                    where=f"MASTER_ADDR={endpoint.host}, MASTER_PORT={endpoint.port}, on {socket.gethostname()}",
                    why=why_unreached(error, endpoint.host),
                    fix=f"check MASTER_ADDR; `getent hosts {endpoint.host}` shows what this machine makes of it"
                    if unknown
                    else f"check that {name} has started, that MASTER_ADDR and MASTER_PORT are the same on all ranks, "
                    "and the network and the firewall between the machines",
                )
                failure.missing = (0,) if name == "rank 0" else ()
                raise failure from error
        slow.look()
        time.sleep(pause)
        pause = min(1.0, pause * 1.5)


def _waiting_line(rank: int, name: str, endpoint: Endpoint, deadline: float) -> str | None:
    """Of the many that wait for rank 0, one speaks."""
    text = f"rank {rank} waits for {name} at {endpoint}; it gives up in {_seconds(deadline):.0f} s"
    return text if rank == 1 else None


def _seconds(deadline: float) -> float:
    return deadline - time.monotonic()
