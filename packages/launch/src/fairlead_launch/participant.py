"""A launcher among several: it starts and stops the ranks of its node as the coordinator, node 0, decides."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from fairlead.errors import RunFailedError
from fairlead_launch.coordinator import ALIVE_S, SILENT_S, Coordinator, Line, Message, packed, unpacked
from fairlead_launch.ports import DEFAULT_PORT, PortError, bind_listener
from fairlead_launch.restarts import Restarts, last_step
from fairlead_launch.supervise import Group
from fairlead_launch.verdict import OtherNodeError

_TRY_S: Final = 0.2
_PATIENT_S: Final = 6.0
"""After so many seconds the user hears of what is waited for."""


@dataclass(frozen=True)
class Members:
    """The nodes of one start: how many, which one this is, and where rank 0 will listen.

    `start` counts the starts of the job, from 0; `changed` says what is different from the one before.
    """

    num_nodes: int
    node_rank: int
    address: str
    port: int
    start: int = 0
    changed: str | None = None


class Participant:
    """This node of a job of several; node 0 is where `address` is.

    Args:
        address: The name or address of node 0.
        port: The port on which the coordinator listens there; None: 29500.
        nodes: The least and the largest number of nodes of a start.
        rank: Which node this is; among equals the one that comes first is first.
        count: Processes of each node.
        start_s: Seconds in which the nodes of a start must have come.
        restarts: How often the job is restarted; node 0 counts.
        say: Shows a line to the user.
    """

    def __init__(
        self,
        address: str,
        port: int | None,
        *,
        nodes: tuple[int, int],
        rank: int,
        count: int,
        start_s: float,
        restarts: Restarts,
        say: Callable[[str], None],
    ) -> None:
        self._address, self._port, self._rank, self._count = address, port or DEFAULT_PORT, rank, count
        self._nodes, self._start_s, self._restarts, self._say = nodes, start_s, restarts, say
        self._hello = {"kind": "hello", "host": socket.gethostname(), "pid": os.getpid(), "rank": rank, "count": count}
        self._hello |= {"least": nodes[0], "most": nodes[1]}
        self._coordinator: Coordinator | None = None
        self._line: Line | None = None
        self._inbox = collections.deque[Message]()
        self._gone = threading.Event()
        self._received: list[int] = []
        self._stop: int | None = None
        """The stop of this start that the other nodes know of, from here or from one of them."""
        self._go: Message | None = None
        self._trouble: str | None = None
        self._end: Message | None = None
        self._starts = 0
        self._group: Group | None = None
        """The ranks that run now."""

    @property
    def coordinates(self) -> bool:
        """Whether the coordinator runs in this launcher."""
        return self._coordinator is not None

    def run(self, make: Callable[[Members], Group], received: list[int]) -> int:
        """Runs this node's ranks, start after start, until the job has ended; its exit code, or its error is raised.

        Args:
            make: Makes the ranks of this node for a start; their group asks `trouble`.
            received: The signals that have come, and will (`noted_signals`).
        """
        while True:
            members = self.next(received)
            if isinstance(members, int):
                return members
            self._group = make(members)
            try:
                code, failure = self._group.supervise(received), None
            except RunFailedError as error:
                code, failure = 1, error
            self._report(self._group, code, failure)
            self._group = None

    def next(self, received: list[int]) -> Members | int:
        """Waits for the nodes of the next start; the exit code, where there is none, or the job's `FairleadError`."""
        self._received, self._stop = received, None
        if self._line is None and not self._join(received):
            return 128 + received[0]
        patience = time.monotonic() + _PATIENT_S
        while True:
            self._hear()
            if self._end is not None:
                return self._ended(self._end)
            if self._go is not None:
                go, self._go = self._go, None
                if (why := go.pop("why")) is not None:
                    self._say(why)
                self._starts = go["start"] + 1
                return Members(**go)
            self._pass_on(received[0] if received else None)
            if time.monotonic() > patience:
                patience = math.inf
                self._say("waiting for other nodes; if the job runs already, until its ranks save or restart")
            time.sleep(0.02)

    def trouble(self, stop: int | None) -> str | None:
        """Why the ranks of this node cannot continue; passes stops on to the other nodes, and from them."""
        self._pass_on(stop)
        self._hear()
        return self._trouble

    def _report(self, group: Group, code: int, failure: RunFailedError | None) -> None:
        """Tells how the ranks of this node have ended: it waits for the next start, or the end."""
        error = None
        if failure is not None:
            host = f"node {self._rank}, {self._hello['host']}" if self._nodes[0] == self._nodes[1] else None
            error = packed(failure)
            error["where"] = "; ".join(filter(None, (host or str(self._hello["host"]), error["where"])))
        self._pass_on(group.stop)
        first = not isinstance(failure, OtherNodeError)
        self._send({"kind": "ended", "code": code, "step": last_step(group), "error": error, "first": first})

    def close(self) -> None:
        """Leaves; node 0 waits until all have heard of the end."""
        if self._line is not None:
            self._line.close()
        if self._coordinator is not None:
            self._coordinator.close()

    def _join(self, received: Sequence[int]) -> bool:
        """Connects to the coordinator, which it starts on node 0; False: a signal came first."""
        if self._rank == 0 and (listener := self._listener()) is not None:
            self._coordinator = Coordinator(
                listener,
                self._address,
                nodes=self._nodes,
                count=self._count,
                start_s=self._start_s,
                restarts=self._restarts,
                say=self._say,
            )
        began, patient = time.monotonic(), False
        address = "localhost" if self.coordinates else self._address
        while True:
            try:
                connection = socket.create_connection((address, self._port), timeout=_PATIENT_S)
                break
            except OSError as error:
                failure = error
            waited = time.monotonic() - began
            if waited > self._start_s:
                raise RunFailedError(
                    f"node 0 did not answer within {self._start_s:g} s",
                    where=f"{self._address}:{self._port}",
                    why=str(failure),
                    fix="start its launcher, with this --main-address and --main-port; a firewall may close the port",
                )
            if waited > _PATIENT_S and not patient:
                patient = True
                self._say(f"waiting for node 0 at {self._address}:{self._port}: {failure}")
            if received:
                return False
            time.sleep(_TRY_S)
        connection.settimeout(SILENT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._line = Line(connection)
        self._line.send({**self._hello, "lead": self.coordinates})
        threading.Thread(target=self._read, args=(self._line,), name="fairlead-node", daemon=True).start()
        threading.Thread(target=self._live, args=(self._line,), name="fairlead-alive", daemon=True).start()
        return True

    def _listener(self) -> socket.socket | None:
        """Where the coordinator listens; None: it runs in another launcher, here or on another machine."""
        fixed = self._nodes[0] == self._nodes[1]
        if not fixed and not _is_here(self._address):
            return None
        try:
            return bind_listener((self._port,))
        except PortError:
            if fixed:
                raise
            return None

    def _read(self, line: Line) -> None:
        while (messages := line.receive()) is not None:
            self._inbox.extend(messages)
        self._gone.set()

    def _live(self, line: Line) -> None:
        while not self._gone.wait(ALIVE_S):
            line.send({"kind": "alive"})

    def _hear(self) -> None:
        """Takes in what the coordinator has sent."""
        gone = self._gone.is_set()  # then all that it has sent is in the inbox
        while self._inbox:
            message = self._inbox.popleft()
            kind = message.pop("kind")
            if kind == "go":
                self._go, self._trouble = message, None  # what is said of the last start may come late
            elif kind == "end":
                self._end = message
            elif kind == "trouble":
                self._trouble = message["why"]
            elif kind == "stop" and self._stop in (None, signal.SIGUSR1):  # else this node has had it too
                self._stop = message["signal"]
                self._received.append(message["signal"])
            elif kind == "grow" and self._group is not None and self._group.run is not None:  # it stops on request
                self._say(f"{message['who']} has joined: the ranks save, stop, and restart with it")
                self._stop = signal.SIGUSR1
                self._received.append(signal.SIGUSR1)
        if self._end is None and gone:
            error = RunFailedError(
                f"node 0 was lost, which leads the others: {self._address}:{self._port}",
                why="its launcher was killed, or its machine or the network went down",
                fix="look at the output of node 0, and restart all nodes",
            )
            self._end, self._trouble = {"code": 1, "error": packed(error), "own": True}, error.what

    def _pass_on(self, stop: int | None) -> None:
        if stop is not None and stop != self._stop:
            self._stop = stop
            self._send({"kind": "stop", "signal": int(stop)})

    def _send(self, message: Message) -> None:
        assert self._line is not None
        self._line.send(message)

    def _ended(self, end: Message) -> int:
        """The exit code, which is the same on all nodes, as is the error."""
        if end["error"] is not None:
            error = unpacked(end["error"])
            if not self.coordinates and "own" not in end:
                error.why, error.fix = None, "read the output of node 0"
            raise error
        code: int = end["code"]
        if code > 128 and not self._starts:
            self._say(f"stopped by {signal.Signals(code - 128).name} before it began; nothing was lost")
        return code


def _is_here(address: str) -> bool:
    """Whether an address is this machine's."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, _, _, found_address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(found_address)
            return True
    return False
