"""How the nodes of a screen hear of each other: node 0 collects what each says, and tells all; no torch.

A node that never comes, or falls silent, does not hold up the others: it is `gone`, with the reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fairlead.errors import RunFailedError
from fairlead_launch.ports import bind_listener

ALIVE_S: Final = 1.0
SILENT_S: Final = 60.0
"""Seconds without a sign of life of a node's doctor, which gives one each second whatever its checks do."""
UNRESOLVED_S: Final = 20.0
"""Seconds in which the name of node 0 has to resolve."""
_TICK_S: Final = 0.25
_LONGEST: Final = 1 << 24
_CONNECT_S: Final = 5.0
_NODE_0: Final = "look at the output of node 0, the first of the job"


class UnreachableError(RunFailedError):
    """Node 0 is not to be reached from here."""


@dataclass
class _Peer:
    socket: socket.socket
    heard: float
    node: int = -1
    data: bytes = b""


@dataclass
class _Phase:
    values: dict[int, Any] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)
    reported: bool = False


def _greeting(identity: str) -> bytes:
    return f"fairlead-doctor-1 {hashlib.sha256(identity.encode()).hexdigest()[:32]}\n".encode()


class Board:
    """What node 0 has for all, in a thread.

    Args:
        ports: It listens on the first of them that is free.
        identity: What no other start has.
        nodes: How many are to come.
        arrive_s: Seconds in which they must have come.
        given_up: Of a node that has not come: why it will not, where that is known.
        silent_s: See `SILENT_S`.
    """

    def __init__(
        self,
        ports: Iterable[int],
        identity: str,
        nodes: int,
        *,
        arrive_s: float,
        given_up: Callable[[int], str | None] = lambda node: None,
        silent_s: float = SILENT_S,
    ) -> None:
        _raise_file_limit(nodes)
        self._listener = bind_listener(ports)
        self._greeting = _greeting(identity)
        self.port: int = self._listener.getsockname()[1]
        self._nodes, self._arrive_s, self._silent_s, self._given_up = nodes, arrive_s, silent_s, given_up
        self._peers: dict[int, _Peer] = {}
        self._gone: dict[int, str] = {}
        self._phases: dict[str, _Phase] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="fairlead-doctor-board", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it; who still waits learns that node 0 has gone."""
        self._closing.set()
        self._thread.join(5.0)

    def _serve(self) -> None:
        began = looked = time.monotonic()
        while not self._closing.is_set():
            for key, _ in self._selector.select(_TICK_S):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            now = time.monotonic()
            for peer in list(self._peers.values()):
                if now - peer.heard > self._silent_s:
                    self._lose(peer, f"nothing was heard of it for {self._silent_s:g} s")
            if now - looked > 1.0:
                looked = now
                for node in set(range(self._nodes)) - self._peers.keys() - self._gone.keys():
                    why = self._given_up(node)
                    if why is None and now - began > self._arrive_s:
                        why = f"it did not come within {self._arrive_s:g} s"
                    if why is not None:
                        self._gone[node] = why
            self._tell()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed already
            connection, _ = self._listener.accept()
            connection.settimeout(_CONNECT_S)
            connection.sendall(self._greeting)
            self._selector.register(connection, selectors.EVENT_READ, _Peer(connection, time.monotonic()))

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(1 << 16)
        except OSError:
            data = b""
        lines = (peer.data + data).split(b"\n")
        peer.data, peer.heard = lines.pop(), time.monotonic()
        if not data or len(peer.data) > _LONGEST:
            self._lose(peer, "its doctor has ended" if not data else "it does not speak as a doctor does")
            return
        try:
            for line in lines:
                self._take(peer, json.loads(line))
        except (ValueError, KeyError, TypeError):
            self._lose(peer, "it does not speak as a doctor does")

    def _take(self, peer: _Peer, message: Mapping[str, Any]) -> None:
        if "node" in message:
            node = int(message["node"])
            if node in self._peers or node in self._gone or not 0 <= node < self._nodes:
                self._send(peer, {"refused": self._gone.get(node, f"node {node} is there already")})
                return
            peer.node = node
            self._peers[node] = peer
        elif "ping" in message:
            self._send(peer, {"pong": time.time()})
        elif "phase" in message and peer.node in self._peers:
            phase = self._phases.setdefault(message["phase"], _Phase())
            phase.values[peer.node] = message["value"]
            if message["share"]:
                phase.shared.add(peer.node)

    def _lose(self, peer: _Peer, why: str) -> None:
        self._selector.unregister(peer.socket)
        peer.socket.close()
        if self._peers.pop(peer.node, None) is not None:
            self._gone[peer.node] = why

    def _tell(self) -> None:
        """Answers once all nodes that are there have reported."""
        for name, phase in list(self._phases.items()):
            if phase.reported or set(range(self._nodes)) - phase.values.keys() - self._gone.keys():
                continue
            phase.reported = True
            short = {"phase": name, "values": {}, "gone": self._gone}
            full = {**short, "values": phase.values}
            for node, peer in list(self._peers.items()):
                self._send(peer, full if node in phase.shared else short)

    def _send(self, peer: _Peer, message: Mapping[str, Any]) -> None:
        try:
            peer.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # perhaps in the middle of a message: `_read` tells that it is gone, here and there
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)


class Seat:
    """A node's connection to the board of node 0.

    Args:
        host: The name or address of node 0.
        ports: Those of the board.
        identity: As the board has it.
        node: Which node this is.
        patience_s: Seconds to look for it.
        unresolved_s: See `UNRESOLVED_S`.

    Raises:
        UnreachableError: It is not there, or not to be found.
    """

    def __init__(
        self,
        host: str,
        ports: Iterable[int],
        identity: str,
        node: int,
        *,
        patience_s: float,
        unresolved_s: float = UNRESOLVED_S,
    ) -> None:
        self._node = node
        self._socket = _find(host, tuple(ports), _greeting(identity), patience_s, unresolved_s)
        self._file = self._socket.makefile("rb")
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._send({"node": node})
        self._thread = threading.Thread(target=self._beat, name="fairlead-doctor-alive", daemon=True)
        self._thread.start()

    def gather(self, phase: str, value: Any, *, share: bool = True) -> tuple[dict[int, Any], dict[int, str]]:
        """Waits until all nodes have reported; returns the reports, and which nodes are gone and why.

        Without `share` the first is empty: what is not needed is not sent to a thousand nodes.

        Raises:
            UnreachableError: Node 0 has gone.
        """
        self._send({"phase": phase, "value": value, "share": share})
        message = self._receive(lambda one: one.get("phase") == phase)
        values, gone = message["values"], message["gone"]
        return {int(node): one for node, one in values.items()}, {int(node): why for node, why in gone.items()}

    def offset_s(self, tries: int = 5) -> float:
        """By how many seconds the clock of node 0 is ahead of this one's: of the quickest of some questions."""
        found: list[tuple[float, float]] = []
        for _ in range(tries):
            before = time.time()
            self._send({"ping": before})
            pong = self._receive(lambda one: "pong" in one)["pong"]
            after = time.time()
            found.append((after - before, pong - (before + after) / 2))
        return min(found)[1]

    def close(self) -> None:
        """Leaves."""
        self._closed.set()
        self._thread.join(2 * ALIVE_S)
        self._file.close()
        self._socket.close()

    def _receive(self, wanted: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
        while True:
            try:
                line = self._file.readline()
            except OSError:
                line = b""
            if not line:
                raise UnreachableError("node 0 has ended before the screen was over", fix=_NODE_0)
            message: dict[str, Any] = json.loads(line)
            if "refused" in message:
                raise UnreachableError(
                    f"node 0 continues without node {self._node}", why=message["refused"], fix=_NODE_0
                )
            if wanted(message):
                return message

    def _send(self, message: Mapping[str, Any]) -> None:
        with self._lock, contextlib.suppress(OSError):  # `_receive` tells that node 0 is gone
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _beat(self) -> None:
        while not self._closed.wait(ALIVE_S):
            self._send({"alive": True})


def _raise_file_limit(nodes: int) -> None:
    """Each node has a connection; 1024 files are usual."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = nodes + 256 if hard == resource.RLIM_INFINITY else min(nodes + 256, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _find(host: str, ports: tuple[int, ...], greeting: bytes, patience_s: float, unresolved_s: float) -> socket.socket:
    began, pause = time.monotonic(), 0.05
    while True:
        for port in ports:
            connection = None
            try:
                connection = socket.create_connection((host, port), timeout=_CONNECT_S)
                if connection.recv(len(greeting), socket.MSG_WAITALL) == greeting:
                    connection.settimeout(None)
                    return connection
                why, limit = f"another service listens on {', '.join(map(str, ports))}", patience_s
            except socket.gaierror as error:
                why, limit = f"its name {host} does not resolve ({error.strerror})", min(unresolved_s, patience_s)
                break
            except OSError as error:
                why, limit = f"{host}: {error.strerror or 'it does not answer'}", patience_s
            if connection is not None:
                connection.close()
        if time.monotonic() - began > limit:
            raise UnreachableError(
                "node 0 cannot be reached",
                where=f"{socket.gethostname()}, ports {', '.join(map(str, ports))} of {host}",
                why=why,
                fix=_NODE_0,
            )
        time.sleep(pause)
        pause = min(1.0, pause * 1.5)
