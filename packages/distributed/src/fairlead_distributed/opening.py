"""Where the ranks meet: a store that is there already, or at an address that `init_method` or the environment names.

Ranks that know no port find rank 0 by a listener on one of several ports, with a name on it.

Torch's own client waits for ever on a service that accepts and stays silent (torch 2.13). So rank 0 listens on the
first free port of a list that all ranks derive alike, until all have come, and answers each connection with which
start it belongs to and where its store is. A client sends nothing before that.
"""

from __future__ import annotations

import hashlib
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
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
from fairlead_distributed.store import tcp_store
from fairlead_distributed.threads import within
from fairlead_launch.ports import DEFAULT_PORT, PortError, bind_listener

_WORD = "fairlead-listener-1"
_LONGEST = 128  # bytes of a name; a foreign service may send anything
_PATIENCE_FIRST, _PATIENCE_LAST = 1.0, 15.0  # seconds for an answer: a silent foreigner delays, a busy rank 0 is slow
_ALL_EVERY = 4  # rounds
_JITTER = random.SystemRandom()  # the global generator is the training's


def _nonce(identity: str) -> str:
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


class StartListener:
    """Rank 0's socket, on the first free port; a PortError where none is, or another listener has the same identity."""

    def __init__(self, identity: str, ports: Iterable[int], store_port: int) -> None:
        ports = tuple(ports)
        self._listener = bind_listener(ports)
        self.port: int = self._listener.getsockname()[1]
        try:
            _refuse_twin(identity, ports[: ports.index(self.port)])
        except PortError:
            self._listener.close()
            raise
        self._answer = f"{_WORD} {_nonce(identity)} {store_port}\n".encode()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="fairlead-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening; those who came have their answer."""
        if self._closing:
            return
        self._closing = True
        # Closing alone does not wake a thread that waits in accept().
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:  # not on every system for a listening socket
            socket.create_connection(("localhost", self.port), timeout=1.0).close()
        self._thread.join(5.0)
        self._listener.close()

    def _serve(self) -> None:
        while not self._closing:
            try:
                visitor, _ = self._listener.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(0.05)  # out of file descriptors, or the visitor was gone already
                continue
            with visitor:
                visitor.setblocking(False)  # it fits into the kernel's buffer; no visitor can block the listener
                try:
                    visitor.send(self._answer)
                except OSError:
                    continue


class Answer(NamedTuple):
    """What answered on a port: the store's numeric address and port, or for messages what it was instead."""

    store: tuple[str, int] | None
    what: str
    unresolved: bool = False
    refused: bool = False


def look(host: str, port: int, identity: str, patience: float) -> Answer:
    """Reads what a service on one port sends, and sends nothing."""
    try:
        with socket.create_connection((host, port), timeout=patience) as connection:
            address = str(connection.getpeername()[0])
            return _understood(_read(connection), address, identity)
    except OSError as error:
        return Answer(None, why_unreached(error, host), unresolved=isinstance(error, socket.gaierror), refused=True)


def why_unreached(error: OSError, host: str) -> str:
    """Why there is no connection to a machine."""
    if isinstance(error, socket.gaierror):
        return f"the name {host!r} does not resolve ({error.strerror})"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: no process listens there"
    return "the machine does not answer" if isinstance(error, TimeoutError) else error.strerror or str(error)


def _read(connection: socket.socket) -> bytes | None:
    """The first line that a service sends; None when it sends nothing."""
    try:
        return connection.makefile("rb").readline(_LONGEST)
    except TimeoutError:
        return None
    except OSError:
        return b""


def _understood(text: bytes | None, address: str, identity: str) -> Answer:
    if text is None:
        return Answer(None, "a process listens, but sends nothing")
    words = text.decode("ascii", errors="replace").split()
    if len(words) != 3 or words[0] != _WORD or not words[2].isdigit():
        return Answer(None, "another service listens")
    if words[1] != _nonce(identity):
        return Answer(None, "the ranks of another start meet there")
    return Answer((address, int(words[2])), "the listener")


def find_store(host: str, ports: Iterable[int], identity: str, *, rank: int, timeout: float) -> tuple[str, int]:
    """The address in numbers and the port of the store whose listener is on one of some ports; looks until it is there.

    So torch connects to the same machine, and needs no name server. Raises an AddressNotFoundError, or after
    `timeout` seconds an AddressUnreachableError.
    """
    ports, deadline, turn = tuple(ports), time.monotonic() + timeout, 0
    seen: dict[int, Answer] = {}

    def progress() -> str | None:
        left = deadline - time.monotonic()
        text = f"rank {rank} waits for rank 0 of {identity} at {host}; it gives up in {left:.0f} s"
        return text if rank == 1 else None  # one speaks for all

    slow = SlowWait(progress)
    while True:
        patience = min(_PATIENCE_FIRST * 1.5**turn, _PATIENCE_LAST, max(0.1, deadline - time.monotonic()))
        for port in ports:
            seen[port] = found = look(host, port, identity, patience)
            if found.store is not None:
                return found.store
            # Rank 0 takes the first free port, so where no process listens it has not come yet, or the port was in use
            # then and is free now: look behind it now and then only. 16,000 ranks ask.
            if found.unresolved or (found.refused and turn % _ALL_EVERY < _ALL_EVERY - 1):
                break
            if time.monotonic() >= deadline:
                break
        # All ranks start at once; they must not ask at once for ever.
        pause = min(2.0, 0.05 * 1.5**turn) * _JITTER.uniform(0.5, 1.0)
        turn += 1
        if time.monotonic() + pause >= deadline:
            raise _not_found(host, seen, identity, rank, timeout)
        slow.look()
        time.sleep(pause)


def _not_found(
    host: str, seen: dict[int, Answer], identity: str, rank: int, timeout: float
) -> AddressNotFoundError | AddressUnreachableError:
    where = f"main address {host}, ports {', '.join(map(str, seen))}"
    last = next(reversed(seen.values()))
    if last.unresolved:
        return AddressNotFoundError(
            f"rank {rank} cannot reach rank 0: {last.what}",
            where=where,
            why=f"it looked for {timeout:.0f} s, on {socket.gethostname()}",
            fix=f"`getent hosts {host}` shows what this machine makes of the name; give a name or an address that all "
            "nodes know with `environment.main_address` or MASTER_ADDR",
        )
    listed: dict[str, list[str]] = {}
    for port, answer in seen.items():
        listed.setdefault(answer.what, []).append(str(port))
    error = AddressUnreachableError(
        f"rank {rank} found no rank 0 of {identity} at {host} within {timeout:.0f} s",
        where=where,
        why="\n".join(f"{what}: {', '.join(numbers)}" for what, numbers in listed.items()),
        fix="look at the output of rank 0: it did not start, or ended before; where it waits, a firewall may be "
        "between the nodes, or the main address belongs to another machine (`environment.main_address`)",
    )
    error.missing = (0,)
    return error


def _refuse_twin(identity: str, taken: Iterable[int]) -> None:
    """Two launches that cannot tell each other apart must not exchange their ranks."""
    for port in taken:
        if look("localhost", port, identity, _PATIENCE_FIRST).store is not None:
            raise PortError(
                f"another rank 0 of {identity} waits for its ranks on this machine",
                where=f"port {port} of {socket.gethostname()}",
                why="two launches have the same job, step and restart count, or two processes say that they are rank 0",
                fix="give each launch its own port: export MASTER_PORT for all its ranks",
            )


class Endpoint(NamedTuple):
    """Where the store of a run is: the address and port of its master."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Opened(NamedTuple):
    """A store that all ranks share, and its address for messages; once closed, no further rank finds it."""

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
    """The address that answers, in numbers: torch connects to the same machine, and needs no name server."""
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
