"""Node 0 coordinates the launchers of a job: who takes part in a start, who failed, whether there is another start.

All decisions are made here, in one thread, from what each launcher reports over its own connection. Torch's
elastic rendezvous does not serve for this: it needs torch in the launcher, gives ranks by host name, notices a dead
node when all others have failed of it, and leaves the count of restarts and the exit code to each node.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fairlead.errors import ConfigError, FairleadError, RunFailedError
from fairlead_launch.ports import HeldPort
from fairlead_launch.restarts import Restarts
from fairlead_launch.verdict import SAVED

_TICK_S: Final = 0.1
_LATE_S: Final = 5.0
"""How long a first start with the least number of nodes waits for more, after the last one that came."""
_SAVE_S: Final = 45.0
"""How long the ranks of other nodes may take to save and end, after those of one node have stopped."""
_LEAVE_S: Final = 5.0
"""How long the others may take to hear of the end."""
_FINAL: Final = (signal.SIGTERM, signal.SIGINT)


@dataclass(eq=False)
class _Node:
    """A launcher that has connected."""

    line: Line
    heard: float
    name: str = "a connection that has not introduced itself"
    rank: int = -1
    """Its number; below 0 it takes no part: it has not introduced itself, was refused, or was stopped."""
    lead: bool = False

    @property
    def known(self) -> bool:
        """Whether it takes part."""
        return self.rank >= 0


@dataclass
class _Start:
    """One start of the ranks on `size` nodes; its `members` are those of them that are not lost."""

    size: int
    members: list[_Node]
    results: dict[_Node, Message] = field(default_factory=dict)
    give_up_at: float | None = None
    grows: bool = False


class Coordinator:
    """Starts the ranks of all nodes together, and decides what follows when they have ended.

    Args:
        listener: Where the launchers connect.
        address: What the ranks of other nodes reach this machine by.
        nodes: The least and the largest number of nodes of a start.
        count: Processes of each node.
        start_s: Seconds in which the nodes of a start must have come.
        restarts: How often there is another start.
        say: Shows a line to the user of node 0.
    """

    def __init__(
        self,
        listener: socket.socket,
        address: str,
        *,
        nodes: tuple[int, int],
        count: int,
        start_s: float,
        restarts: Restarts,
        say: Callable[[str], None],
    ) -> None:
        self._listener, self._address = listener, address
        self._main_port = int(listener.getsockname()[1])
        self._least, self._most = nodes
        self._count, self._start_s, self._restarts, self._say = count, start_s, restarts, say
        self._held = HeldPort()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._nodes: list[_Node] = []
        self._last: _Start | None = None
        """The newest start of the ranks."""
        self._running = False
        """Whether its ranks still run; else the nodes of the next one are waited for."""
        self._starts = 0
        self._gather_since = self._came = self._alive = time.monotonic()
        self._lost: list[str] = []
        self._stop: int | None = None
        self._last_error: Message | None = None
        self._why: str | None = None
        """Why there is another start."""
        self._over = False
        self._thread = threading.Thread(target=self._run, name="fairlead-coordinator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits until all have heard of the end."""
        self._thread.join(_LEAVE_S + 1)

    def _run(self) -> None:
        try:
            leave_by = None
            while leave_by is None or (self._nodes and time.monotonic() < leave_by):
                self._listen()
                if self._over:
                    leave_by = leave_by or time.monotonic() + _LEAVE_S
                elif self._last is not None and self._running:
                    self._watch(self._last)
                else:
                    self._gather()
        finally:
            for node in self._nodes:
                node.line.close()
            self._listener.close()
            self._selector.close()
            self._held.close()

    def _listen(self) -> None:
        """Takes in what has come, and who has gone."""
        for key, _ in self._selector.select(_TICK_S):
            if key.data is None:
                self._accept()
            elif (messages := key.data.line.receive()) is None:
                self._leave(key.data, "its launcher was killed, or its machine went down")
            else:
                key.data.heard = time.monotonic()
                try:
                    for message in messages:
                        self._handle(key.data, message)
                except (KeyError, TypeError):
                    self._leave(key.data, "it does not speak as a launcher does")
        now = time.monotonic()
        if now - self._alive >= ALIVE_S:
            self._alive = now
            self._send(self._nodes, {"kind": "alive"})
        for node in [node for node in self._nodes if now - node.heard > SILENT_S]:
            self._leave(node, f"nothing was heard of it for {SILENT_S:g} s: its machine or the network went down")

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(SILENT_S)
        node = _Node(Line(connection), time.monotonic())
        self._nodes.append(node)
        self._selector.register(connection, selectors.EVENT_READ, node)

    def _leave(self, node: _Node, why: str) -> None:
        self._nodes.remove(node)
        self._selector.unregister(node.line.socket)
        node.line.close()
        last = self._last
        if last is None or node not in last.members or self._over:
            return
        last.members.remove(node)
        self._lost.append(node.name)
        if self._running and node not in last.results:
            error = RunFailedError(f"{node.name} was lost", why=why, fix="look at that machine, and at its own output")
            last.results[node] = {"error": packed(error), "first": True, "step": None}
            self._trouble(last, f"{node.name} was lost: {why}")

    def _handle(self, node: _Node, message: Message) -> None:
        kind, last = message["kind"], self._last
        if not node.known:
            if kind == "hello":
                self._welcome(node, message)
        elif kind == "stop" and last is not None and node not in last.members:
            node.rank = -1  # the others continue
            self._send([node], {"kind": "end", "code": 128 + message["signal"], "error": None})
        elif kind == "stop" and (self._stop is None or (self._stop not in _FINAL and message["signal"] in _FINAL)):
            self._stop = message["signal"]
            self._send([other for other in self._nodes if other is not node], message)
        elif kind == "ended" and last is not None and self._running and node in last.members:
            last.results[node] = message
            failed = message["error"] is not None
            if failed and message["first"] and self._stop is None:
                self._trouble(last, f"{node.name}: {message['error']['what']}")
            elif failed or message["code"] not in (0, SAVED):
                last.give_up_at = last.give_up_at or time.monotonic() + _SAVE_S

    def _welcome(self, node: _Node, message: Message) -> None:
        known = self._known()
        own = {"least": self._least, "most": self._most, "count": self._count}
        name = f"node {message['rank']} on {message['host']}"
        refused = None
        if any(own[setting] != message[setting] for setting in own):
            asks, do = (f"{one['least']} to {one['most']} nodes of {one['count']} processes" for one in (message, own))
            refused = f"it asks for {asks}, and node 0 for {do}"
        elif len(known) >= self._most:
            refused = f"{len(known)} nodes are there already: {', '.join(one.name for one in known)}"
        elif self._fixed and (twin := [one for one in known if one.rank == message["rank"]]):
            refused = f"{twin[0].name} is there already"
        if refused is not None:
            error = ConfigError(
                f"{name} cannot take part: {refused}",
                where=f"{self._address}:{self._main_port}",
                fix="start all nodes with the same options, each with its own --node-rank",
            )
            self._send([node], {"kind": "end", "code": error.exit_code, "error": packed(error), "own": True})
            return
        node.rank, node.lead = message["rank"], message["lead"]
        node.name = name if self._fixed else f"the node on {message['host']} (process {message['pid']})"
        if node.name in self._lost:
            self._lost.remove(node.name)
        self._came = time.monotonic()

    @property
    def _fixed(self) -> bool:
        return self._least == self._most

    def _known(self) -> list[_Node]:
        """Those that take part: node 0 first, then by number, then as they came."""
        return sorted((node for node in self._nodes if node.known), key=lambda node: (not node.lead, node.rank))

    def _gather(self) -> None:
        """Starts the ranks, when enough nodes are there."""
        known, now = self._known(), time.monotonic()
        # The first start waits for all that may come; another one takes those that are there.
        settled = self._last is not None or len(known) >= self._most or now - self._came > _LATE_S
        if self._stop is not None:
            self._end(SAVED if self._starts else 128 + self._stop, self._last_error)
        elif self._fixed and self._lost:  # into a range others may come
            self._end(1, self._too_few())
        elif len(known) >= self._least and known[0].lead and settled:
            self._start(known)
        elif now - self._gather_since > self._start_s:
            self._end(1, self._too_few())

    def _too_few(self) -> Message:
        known, where = self._known(), None
        if self._lost:
            rest = "no other node is left" if self._fixed else f"no other came within {self._start_s:g} s"
            what = f"{', '.join(self._lost)} lost: {rest}"
        else:
            what = f"{len(known)} of {self._least} nodes came within {self._start_s:g} s"
            absent = [str(rank) for rank in range(self._most) if rank not in {node.rank for node in known}]
            where = f"not heard of: node {', '.join(absent)}" if self._fixed and absent else None
        last = self._last_error["what"] if self._last_error is not None else what
        before = f"\nbefore that: {last}" if last not in what else ""
        there = f"there {'is' if len(known) == 1 else 'are'}: {', '.join(node.name for node in known)}"
        fix = "look at their machines and launchers; a slow start needs a longer --start-timeout, and a range, as "
        fix += "--nnodes 2:4, continues without a lost node"
        return packed(RunFailedError(what, where=where, why=f"{there}{before}", fix=fix))

    def _start(self, members: Sequence[_Node]) -> None:
        before, changed = self._last, []
        if before is not None and (new := [node.name for node in members if node not in before.members]):
            changed.append(f"{', '.join(new)} came in")
        if before is not None and len(members) != before.size:
            what = "trainer.batch_policy decides what becomes of the batch"
            changed.append(f"{len(members)} node{'s'[: len(members) != 1]}, {before.size} before: {what}")
        # Behind the launchers' own port, for a firewall that lets some through. Another one in each start: ranks that
        # are left over from the last one cannot connect.
        port = self._held.hold([*range(self._main_port + 1, min(self._main_port + 101, 65536)), 0])
        for index, node in enumerate(members):
            go = {"kind": "go", "num_nodes": len(members), "node_rank": index, "address": self._address, "port": port}
            go |= {"start": self._starts, "changed": "; ".join(changed) or None}
            self._send([node], {**go, "why": None if node.lead else self._why})
        self._last, self._running = _Start(len(members), list(members)), True
        self._starts += 1

    def _watch(self, this: _Start) -> None:
        """Looks for what the ranks of a start need next."""
        new = [node for node in self._known() if node not in this.members]
        if new and not this.grows and not this.results and self._stop is None:
            this.grows = True
            self._send(this.members, {"kind": "grow", "who": new[0].name})
        if this.give_up_at is not None and time.monotonic() > this.give_up_at:
            self._trouble(this, "the ranks of another node have ended")
        if len(this.results) == this.size:
            self._judge(this)

    def _judge(self, this: _Start) -> None:
        """Another start, or the end, when the ranks of all nodes have ended."""
        results = sorted(this.results.values(), key=lambda one: (one["error"] is None, not one.get("first")))
        error = results[0]["error"]
        steps = [one["step"] for one in results if one["step"] is not None]
        codes = [one["code"] for one in results if one["error"] is None]
        saved = {SAVED, 128 + signal.SIGTERM} if this.grows else {SAVED}  # without a requeuer a stop wants no start
        if error is None and (self._stop is not None or not set(codes) <= {0} | saved or not any(codes)):
            self._end(max([code for code in codes if code != SAVED] if set(codes) - {0, SAVED} else codes))
        elif error is not None and self._stop is not None:
            self._end(1, error)
        elif self._fixed and self._lost:
            self._last_error = error
            self._end(1, self._too_few())
        else:
            self._restart(this, error, max(steps, default=None))

    def _restart(self, this: _Start, error: Message | None, step: int | None) -> None:
        text: str | None = "restarting the ranks, with the node that has come"
        if error is not None or not this.grows:
            failure = unpacked(error) if error is not None else None
            assert failure is None or isinstance(failure, RunFailedError)  # as each start of ranks that ends badly
            try:
                text = self._restarts.after(failure, step)
            except RunFailedError as last:
                self._end(1, packed(last))
                return
        if text is None:
            self._end(SAVED)
            return
        self._last_error = error
        self._running, self._gather_since = False, time.monotonic()
        self._why = f"{error['what']}; restarting the ranks" if error is not None else text
        self._say(text)

    def _end(self, code: int, error: Message | None = None) -> None:
        """The same for all nodes."""
        self._over = True
        self._send(self._nodes, {"kind": "end", "code": 1 if error is not None else code, "error": error})

    def _trouble(self, this: _Start, why: str) -> None:
        """Has the ranks taken down that still run."""
        self._send([node for node in this.members if node not in this.results], {"kind": "trouble", "why": why})

    def _send(self, nodes: Sequence[_Node], message: Message) -> None:
        for node in nodes:
            node.line.send(message)


ALIVE_S: Final = 1.0
"""Seconds between two signs of life."""
SILENT_S: Final = 10.0
"""After so many seconds without one a machine is lost: a killed launcher is noticed at once, by its connection."""
_LONGEST: Final = 1 << 17
"""Bytes of a message; who sends more is no launcher."""

_PARTS: Final = ("what", "where", "why", "fix")

Message = dict[str, Any]


class Line:
    """One end of a connection between two launchers.

    Example:
        >>> a, b = (Line(end) for end in socket.socketpair())
        >>> a.send({"kind": "alive"})
        >>> b.receive()
        [{'kind': 'alive'}]
        >>> a.close()
        >>> b.receive() is None
        True
        >>> b.close()
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._data = b""

    def send(self, message: Message) -> None:
        """Sends; nothing where the other end is gone, which `receive` tells."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """What has come, after waiting for something; None: the other end is gone, or no launcher."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            return None
        lines = (self._data + data).split(b"\n")
        self._data = lines.pop()
        if not data or len(self._data) > _LONGEST:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return messages if all(isinstance(one, dict) and "kind" in one for one in messages) else None

    def close(self) -> None:
        """Closes it, for both ends."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def packed(error: FairleadError) -> Message:
    """An error as a message."""
    return {name: getattr(error, name) for name in (*_PARTS, "exit_code")}


def unpacked(message: Message) -> FairleadError:
    """The error of a message."""
    kind = ConfigError if message["exit_code"] == ConfigError.exit_code else RunFailedError
    return kind(message["what"], **{name: message[name] for name in _PARTS[1:]})
