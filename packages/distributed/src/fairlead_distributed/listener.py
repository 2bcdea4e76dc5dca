"""How ranks that know no port find rank 0: a listener on one of several ports, with a name on it.

Torch's own client waits for ever on a service that accepts and stays silent (torch 2.13). So rank 0 listens on the
first free port of a list that all ranks derive alike, until all have come, and tells everyone who connects which
start it belongs to and where its store is. Nobody says anything before that.
"""

from __future__ import annotations

import hashlib
import random
import socket
import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

from fairlead_distributed.alarms import SlowWait
from fairlead_distributed.errors import AddressNotFoundError, AddressUnreachableError
from fairlead_launch.ports import PortError, bind_listener

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
                visitor.setblocking(False)  # it fits into the kernel's buffer; nobody can hold the listener
                try:
                    visitor.send(self._answer)
                except OSError:
                    continue


class Answer(NamedTuple):
    """What answered on a port: the store's numeric address and port, or for messages what it was instead."""

    store: tuple[str, int] | None
    what: str
    unresolved: bool = False
    nobody: bool = False


def look(host: str, port: int, identity: str, patience: float) -> Answer:
    """Looks at one port, without saying anything to whoever listens there."""
    try:
        with socket.create_connection((host, port), timeout=patience) as connection:
            address = str(connection.getpeername()[0])
            return _understood(_read(connection), address, identity)
    except OSError as error:
        return Answer(None, why_unreached(error, host), unresolved=isinstance(error, socket.gaierror), nobody=True)


def why_unreached(error: OSError, host: str) -> str:
    """Why there is no connection to a machine."""
    if isinstance(error, socket.gaierror):
        return f"the name {host!r} does not resolve ({error.strerror})"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: no process listens there"
    return "the machine does not answer" if isinstance(error, TimeoutError) else error.strerror or str(error)


def _read(connection: socket.socket) -> bytes | None:
    """What somebody says of himself; None when it is nothing."""
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

    So torch connects to the same machine, and asks no name server again. Raises an AddressNotFoundError, or after
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
            # Rank 0 takes the first free port, so where nobody listens it has not come yet, or who held the port then
            # has gone since: look behind it now and then only. 16,000 ranks ask.
            if found.unresolved or (found.nobody and turn % _ALL_EVERY < _ALL_EVERY - 1):
                break
            if time.monotonic() >= deadline:
                break
        # All ranks start at once; they must not ask at once for ever.
        pause = min(2.0, 0.05 * 1.5**turn) * _JITTER.uniform(0.5, 1.0)
        turn += 1
        if time.monotonic() + pause >= deadline:
            raise _nobody(host, seen, identity, rank, timeout)
        slow.look()
        time.sleep(pause)


def _nobody(
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
                fix="give each launch a port of its own: export MASTER_PORT for all its ranks",
            )
