"""The store of a run at an address: hosted by rank 0, or by torchrun's agent, and connected to by the others."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from fairlead.starts import Start
from fairlead_distributed.errors import AddressNotFoundError, AddressUnreachableError, RendezvousError
from fairlead_distributed.listener import StartListener, find_store
from fairlead_distributed.store import tcp_store
from fairlead_launch.ports import PortError, bind_listener


@dataclass(frozen=True)
class Endpoint:
    """Where the store of a run is: the address and port of its master."""

    host: str
    port: int

    def __str__(self) -> str:
        """`host:port`, an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Opened:
    """A store that all ranks share.

    Args:
        store: The store.
        where: Its address, for messages.
        listener: What shows the others the way to it, on rank 0 of ranks that know no port.
    """

    store: dist.Store
    where: str
    listener: StartListener | None = None

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_listener()

    def close_listener(self) -> None:
        """Nobody else finds this store any more."""
        if self.listener is not None:
            self.listener.close()


def agree(host: str, start: Start, *, rank: int, world_size: int, timeout: timedelta) -> Opened:
    """The store of ranks that were given no port: rank 0 takes free ones, the others find it.

    Args:
        host: The main address.
        start: What all ranks know alike; its `ports` are tried.
        rank: This rank.
        world_size: The number of ranks.
        timeout: How long to look for rank 0.

    Raises:
        PortError: No port is free on rank 0's machine, or another launch has the same identity.
        AddressNotFoundError: The main address does not resolve.
        AddressUnreachableError: No rank 0 of this start was found.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        _raise_file_limit(world_size)
        store = tcp_store(bind_listener([0]), timeout=timeout)
        listener = StartListener(start.identity, start.ports, store.port)
        return Opened(store, str(Endpoint(host, listener.port)), listener)
    found = find_store(host, start.ports, start.identity, rank=rank, timeout=timeout.total_seconds())
    return Opened(_client(Endpoint(*found), rank, "rank 0", deadline), str(Endpoint(host, found[1])))


def connect(
    endpoint: Endpoint, *, rank: int, world_size: int, environ: Mapping[str, str], timeout: timedelta
) -> Opened:
    """The store at a port that was given: hosted by rank 0, or by torchrun's agent when it says so.

    Raises:
        PortError: Rank 0 cannot listen on the port.
        AddressNotFoundError: The host's name does not resolve.
        AddressUnreachableError: Nothing answered within the timeout.
    """
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0 and not agent:
        _raise_file_limit(world_size)
        return Opened(_host(endpoint, timeout), str(endpoint))
    name = "torchrun's agent" if agent else "rank 0"
    address = _await_listener(endpoint, rank, name, deadline)
    return Opened(_client(Endpoint(address, endpoint.port), rank, name, deadline), str(endpoint))


def _raise_file_limit(world_size: int) -> None:
    """The store has an open connection of each rank, and more than one once the group is made; 1024 files are usual."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1024 + 4 * world_size
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
        reason = str(error).splitlines()[0]
        if "EADDRINUSE" not in reason:
            raise RendezvousError(
                f"rank 0 could not open its store at {endpoint}",
                where=f"port {endpoint.port} of {socket.gethostname()}",
                why=reason,
                fix="give another port to all ranks (MASTER_PORT); below 1024 only root can listen",
            ) from error
        raise PortError(
            f"rank 0 cannot listen on port {endpoint.port} of {socket.gethostname()}: it is in use",
            where=f"MASTER_PORT={endpoint.port}, MASTER_ADDR={endpoint.host}",
            why="another run on this machine uses it, or an earlier one has not ended",
            fix=f"give another port to all ranks (MASTER_PORT={endpoint.port + 1}), or end the process that "
            f"holds it: ss -ltnp 'sport = :{endpoint.port}'; in a job of SLURM, LSF or mpirun leave MASTER_PORT and "
            "`environment.main_port` out, and the ranks take a free one",
        ) from error


def _client(endpoint: Endpoint, rank: int, name: str, deadline: float) -> dist.Store:
    """A connection to a store; bounded, which torch's own is not where something else listens."""

    def connected() -> dist.Store:
        return dist.TCPStore(
            endpoint.host, endpoint.port, is_master=False, wait_for_workers=False, timeout=_left(deadline)
        )

    try:
        return _within(connected, _seconds(deadline) + 1.0)
    except (dist.DistNetworkError, TimeoutError) as error:
        raise AddressUnreachableError(
            f"what listens at {endpoint} is not the store of {name}",
            where=f"rank {rank}, on {socket.gethostname()}",
            why=str(error).splitlines()[0],
            fix=f"see what listens there (`ss -ltnp 'sport = :{endpoint.port}'` on that machine), and give all ranks "
            "another port (MASTER_PORT)",
        ) from error


def _within(call: Callable[[], dist.Store], seconds: float) -> dist.Store:
    results: list[dist.Store | BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # it belongs to the thread that waits
            results.append(error)

    thread = threading.Thread(target=run, name="fairlead-connect", daemon=True)
    thread.start()
    thread.join(max(0.1, seconds))
    if not results:
        raise TimeoutError(f"it accepts connections and said nothing within {seconds:.0f} s")
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def _await_listener(endpoint: Endpoint, rank: int, name: str, deadline: float) -> str:
    """The address that answers, in numbers: torch connects to the same machine, and asks no name server again."""
    # A plain connect tells "name unknown", "refused" and "no answer" apart; the store's own client says one thing.
    started, pause = time.monotonic(), 0.02
    kind: type[RendezvousError]
    while True:
        try:
            patience = min(5.0, max(0.1, _seconds(deadline)))
            with socket.create_connection((endpoint.host, endpoint.port), timeout=patience) as connection:
                return str(connection.getpeername()[0])
        except socket.gaierror as error:
            kind, reason = AddressNotFoundError, f"the name {endpoint.host!r} does not resolve ({error.strerror})"
            advice = f"check MASTER_ADDR; `getent hosts {endpoint.host}` shows what this machine makes of it"
        except ConnectionRefusedError:
            kind = AddressUnreachableError
            reason = f"the machine answers, but nothing listens on port {endpoint.port}"
            advice = f"check that {name} has started and that MASTER_PORT is the same on all ranks"
        except OSError as error:
            kind, reason = AddressUnreachableError, f"no answer: {error}"
            advice = "check the network and the firewall between the machines, and MASTER_ADDR"
        if _seconds(deadline) <= pause:
            waited = time.monotonic() - started
            failure = kind(
                f"rank {rank} could not reach {name} at {endpoint} within {waited:.0f} s",
                where=f"MASTER_ADDR={endpoint.host}, MASTER_PORT={endpoint.port}, on {socket.gethostname()}",
                why=reason,
                fix=advice,
            )
            failure.missing = (0,) if name == "rank 0" else ()
            raise failure
        time.sleep(pause)
        pause = min(1.0, pause * 1.5)


def _seconds(deadline: float) -> float:
    return deadline - time.monotonic()


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.05, _seconds(deadline)))
