"""One node's part in the screen of an allocation, from its first word to the exit code that all nodes share."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from fairlead_diagnostics.board import Board, Seat, UnreachableError
from fairlead_diagnostics.checking import Check, Requested, Result
from fairlead_diagnostics.checks import LOCAL, NAMES, OPEN, PAIR
from fairlead_diagnostics.folder import Folder, within
from fairlead_diagnostics.outcome import Outcome
from fairlead_diagnostics.pairs import schedule
from fairlead_diagnostics.verdict import NodeReport, Verdict, judge
from fairlead_diagnostics.worker import Worker

ARRIVE_S: Final = 120.0
"""Seconds in which the doctors of all nodes must have started."""
_DECIDES_S: Final = 600.0
"""Seconds in which it has to be decided what becomes of the job; a scheduler or a disk may hang."""

Decide = Callable[[Verdict, Mapping[int, str]], Outcome]


@dataclass(frozen=True)
class Place:
    """Which node this is, and where the nodes meet.

    Args:
        node: Its number, from 0.
        nodes: How many there are.
        host: Its name, as the others and the scheduler have it.
        main: The name or address of node 0.
        ports: Node 0 takes the first that is free.
        identity: What no other start has.
        hosts: The names of all, by node, where they are known before.
    """

    node: int
    nodes: int
    host: str
    main: str = "127.0.0.1"
    ports: Sequence[int] = ()
    identity: str = ""
    hosts: Sequence[str] = ()


@dataclass(frozen=True)
class Screened:
    """What node 0 knows at the end; the outcome is None until it is decided."""

    verdict: Verdict
    outcome: Outcome | None
    hosts: Mapping[int, str]
    reports: Mapping[int, NodeReport]
    gone: Mapping[int, str]
    seconds: float


@dataclass
class Screen:
    """The screen, as one node goes through it.

    Args:
        position: Which node this is.
        requested: What the job needs of it.
        decide: On node 0: what becomes of the verdict.
        show: On node 0: prints it, called before anything is decided, which may end the job, and after that.
        environ: The variables of this process.
        folder: Where all nodes can write, for what cannot be sent over the network; None: there is none.
        local: The checks that each node makes for itself.
        pair: The one that two nodes make together.
        arrive_s: See `ARRIVE_S`.
    """

    position: Place
    requested: Requested
    decide: Decide
    show: Callable[[Screened], None]
    environ: Mapping[str, str]
    folder: Path | None = None
    local: Sequence[Check] = LOCAL
    pair: Check = PAIR
    arrive_s: float = ARRIVE_S

    def __post_init__(self) -> None:
        self._files = Folder(self.folder, self.position.nodes)

    def run(self) -> int:
        """Goes through it; the exit code, the same on all nodes.

        Raises:
            UnreachableError: Node 0 is not to be found, or has gone, and no file says what it decided.
        """
        position, began = self.position, time.monotonic()
        if position.nodes == 1:
            with Worker(self.requested, self.environ) as worker:
                report = NodeReport(position.host, self._local(worker))
            return self._end({0: report}, {}, {0: position.host}, began).code
        board = None
        try:
            if position.node == 0:
                self._files.watch()
                board = Board(
                    position.ports,
                    position.identity,
                    position.nodes,
                    arrive_s=self.arrive_s + 5.0,
                    given_up=self._files.why,
                )
            ports = [board.port] if board is not None else position.ports
            main = "127.0.0.1" if board is not None else position.main
            seat = Seat(main, ports, position.identity, position.node, patience_s=self.arrive_s)
            try:
                return self._among_others(seat, began)
            finally:
                seat.close()
        except UnreachableError as error:
            # Not ended at once: srun may end all tasks as soon as one has failed.
            code = None
            if board is None:
                code = self._files.cut_off(position.node, f"{error.what}: {error.why}" if error.why else error.what)
            if code is None:
                raise
            return code
        finally:
            self._files.close()
            if board is not None:
                board.close()

    def _among_others(self, seat: Seat, began: float) -> int:
        position = self.position
        with Worker(self.requested, self.environ) as worker:
            values, _ = seat.gather("hello", position.host)
            names = dict(enumerate(position.hosts)) if len(position.hosts) == position.nodes else {}
            hosts = {node: str(values.get(node, names.get(node, f"node {node}"))) for node in range(position.nodes)}
            offset = seat.offset_s()
            results = self._local(worker)
            here, gone = seat.gather("local", None)
            there = {node: hosts[node] for node in sorted(here) if node not in gone}
            results[NAMES.name] = worker.run(
                NAMES, {node: host for node, host in there.items() if node != position.node}
            )
            pairs = self._pairs(seat, worker, there)
            if pairs and all(result.ok is None for result in pairs.values()):
                results[OPEN.name] = next(iter(pairs.values()))
        report = NodeReport(position.host, results, pairs, offset)
        gathered, gone = seat.gather("report", report.plain(), share=position.node == 0)
        code = None
        if position.node == 0:
            code = self._end({node: NodeReport.of(one) for node, one in gathered.items()}, gone, hosts, began).code
        ends, _ = seat.gather("end", code)
        return int(ends[0])

    def _local(self, worker: Worker) -> dict[str, Result]:
        return {check.name: worker.run(check) for check in self.local}

    def _pairs(self, seat: Seat, worker: Worker, there: Mapping[int, str]) -> dict[int, Result]:
        """All-reduce with one partner after the other, all nodes at a time."""
        me, results = self.position.node, {}
        fails, succeeded = Counter[int](), set[int]()
        last: bool | None = None
        for turn, pairs in enumerate(schedule(list(there))):
            store = worker.run(OPEN)
            own = {"port": store.data, "ok": store.ok, "detail": store.detail, "last": last}
            values, gone = seat.gather(f"round {turn}", own)
            fails.update(node for node, one in values.items() if one["last"] is False)
            succeeded |= {node for node, one in values.items() if one["last"]}
            hopeless = {node for node in fails if fails[node] > 1} - succeeded  # it would only cost time
            pair = next((pair for pair in pairs if me in pair), None)
            last = None
            if pair is None or set(pair) & (gone.keys() | hopeless) or not set(pair) <= values.keys():
                continue
            partner = pair[0] if pair[1] == me else pair[1]
            results[partner] = result = self._with(worker, pair, values, there, turn)
            last = result.ok
            if last is False:
                worker.close()  # torch counts the groups that it has tried to make: the next one begins anew
        return results

    def _with(
        self, worker: Worker, pair: tuple[int, int], values: Mapping[int, Any], hosts: Mapping[int, str], turn: int
    ) -> Result:
        for node in pair:
            if not values[node]["ok"]:
                return Result(values[node]["ok"], values[node]["detail"])
        first = pair[0]
        host = None if first == self.position.node else hosts[first]
        # Torch's own words come out before the check's limit.
        return worker.run(self.pair, host, values[first]["port"], turn, 0.7 * self.pair.limit_s)

    def _end(
        self, reports: Mapping[int, NodeReport], gone: Mapping[int, str], hosts: Mapping[int, str], began: float
    ) -> Outcome:
        gone = {node: why for node, why in gone.items() if node not in reports}
        verdict = judge(reports, gone, hosts, self.local)
        screened = Screened(verdict, None, hosts, reports, gone, time.monotonic() - began)
        self.show(screened)
        late = Outcome(1, (f"nothing is excluded: that was not decided within {_DECIDES_S:g} s",))
        outcome = within(_DECIDES_S, lambda: self.decide(verdict, hosts), late)
        self.show(replace(screened, outcome=outcome))
        self._files.report(int(outcome.code), outcome.lines)
        return outcome
