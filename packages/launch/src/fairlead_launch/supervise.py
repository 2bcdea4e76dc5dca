"""Starts the ranks of this machine, watches them, and takes all down when one dies.

A rank reports its error through a pipe, so that what is shown first is the error of the rank that failed first, not
the broken connections that followed. Each leads a process group: what it has started (the workers of a DataLoader)
is ended with it, and Ctrl-C reaches the supervisor alone, which asks the ranks to stop in order.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Final

from fairlead.errors import RunFailedError
from fairlead_launch.output import Output
from fairlead_launch.processes import Starter
from fairlead_launch.reports import ALIVE_FD, REPORT_FD, Announcement, Joining, read_messages
from fairlead_launch.verdict import OtherNodeError, Rank, stopped_as_requested, verdict
from fairlead_runs.waiting import ranks_text

_POLL_S: Final = 0.05
_HEARD_S: Final = 1.0
"""How long the others may take to report, after the first rank failed: several may fail for different reasons."""
_GRACE_S: Final = 5.0
"""How long ranks may take to end by themselves, after SIGTERM, before SIGKILL."""
_GONE_S: Final = 10.0
"""How long what a rank has started may take to be gone, after SIGKILL: until then it has memory of the GPU."""
_STOP_GRACE_S: Final = 30.0
"""The same in a stop, when a rank died of it: another may be writing the checkpoint."""
_MET_S: Final = 15.0
"""The same when a rank has stopped as requested: it has met the others, or timed out waiting for them."""
_STOPS: Final = (signal.SIGTERM, signal.SIGINT)
_PASSED_ON: Final = (signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def noted_signals(early: Sequence[int] = ()) -> Iterator[list[int]]:
    """The signals that ask for a stop, in the order in which they come, `early` ones first; they end nothing."""
    received = list(early)

    def note(signum: int, _frame: FrameType | None) -> None:
        received.append(signum)

    main = threading.current_thread() is threading.main_thread()  # only that one can note them
    previous = {s: signal.signal(s, note) for s in (*_STOPS, *_PASSED_ON)} if main else {}
    try:
        yield received
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


class Group:
    """The ranks of one start on this machine.

    Args:
        start: Starts a rank.
        environments: One environment a rank; `RANK` in it names the rank.
        output: Takes what they print; it is closed at the end.
        stderr: Where the supervisor speaks.
        inherited: File descriptors that the first rank inherits; they are closed here.
        shared: The same for all ranks; they stay open.
        poll_s: Seconds between two looks at the ranks.
        join_s: Seconds that ranks may take to come to the process group, once the first one waits there.
        trouble: Why these ranks cannot continue, whatever they do; None: they can. It gets the signal that
            requested a stop, if any.
    """

    def __init__(
        self,
        start: Starter,
        environments: Sequence[Mapping[str, str]],
        output: Output,
        *,
        stderr: IO[str],
        inherited: Sequence[int] = (),
        shared: Sequence[int] = (),
        poll_s: float = _POLL_S,
        join_s: float = math.inf,
        trouble: Callable[[int | None], str | None] = lambda _stop: None,
    ) -> None:
        self._start_rank = start
        self._environments = environments
        self._output = output
        self._stderr = stderr
        self._inherited = inherited
        self._shared = shared
        self._poll_s = poll_s
        self._join_s = join_s
        self._join_by = math.inf
        self._trouble = trouble
        self.ranks: list[Rank] = []
        self.stop: int | None = None
        """The signal that requested the stop of this group."""

    @property
    def run(self) -> Announcement | None:
        """Where the run of these ranks is, once one of them has announced it."""
        return next((rank.announced for rank in self.ranks if rank.announced is not None), None)

    def supervise(self, received: list[int]) -> int:
        """Runs them until all have ended, and returns the exit code of the job; takes signals from `received`.

        SIGTERM or Ctrl-C asks the ranks to save and stop; a second Ctrl-C ends them at once. Where a rank died, the
        `RunFailedError` names it, with its own traceback first.
        """
        alive_read, alive_write = os.pipe()
        waited = False
        try:
            try:
                for index, environ in enumerate(self._environments):
                    extra = (*self._inherited, *self._shared) if index == 0 else self._shared
                    self.ranks.append(self._start(environ, alive_read, extra))
            finally:
                for fd in self._inherited:
                    os.close(fd)  # with the first rank its socket closes, and whoever waits for it notices
            self._wait(received)
            waited = True
        finally:
            self._end(failed=not received and (self.stop is None or not waited))
            os.close(alive_read)
            os.close(alive_write)
            self._output.close()
        world = int(self._environments[0].get("WORLD_SIZE", len(self.ranks)))
        return verdict(self.ranks, self.stop, self._stderr, self._output, world)

    def _start(self, environ: Mapping[str, str], alive_fd: int, inherited: Sequence[int]) -> Rank:
        read, write = os.pipe()
        number = int(environ["RANK"])
        output = self._output.streams(number)
        variables = {**environ, REPORT_FD: str(write), ALIVE_FD: str(alive_fd)}
        try:
            process = self._start_rank(variables, output, (write, alive_fd, *inherited))
        finally:
            for fd in (write, *output):
                os.close(fd)
        os.set_blocking(read, False)
        return Rank(number, process, read)

    def _wait(self, received: list[int]) -> None:
        """Returns when all have ended, or one failed and the others had their time."""
        give_up_at = math.inf
        while True:
            while received:
                signum = received.pop(0)
                if signum == self.stop == signal.SIGINT:
                    # A person asks twice: no more waiting. Schedulers send SIGTERM twice within milliseconds.
                    give_up_at = min(give_up_at, time.monotonic() + _GRACE_S)
                if self.stop is None:
                    self._announce(signum)
                if self.stop not in _STOPS:
                    self.stop = signum
                for rank in self.ranks:
                    rank.process.send_signal(signum)  # nothing, where it has ended
            for rank in self.ranks:
                self._hear(rank)
                if rank.ended is None and rank.process.poll() is not None:
                    rank.ended = time.time()
                    self._hear(rank)
                    if self.stop is not None and stopped_as_requested(rank.code, rank.report):
                        give_up_at = min(give_up_at, time.monotonic() + _MET_S)
                    elif rank.code != 0:
                        # What was killed did not fail of another rank.
                        patience = _STOP_GRACE_S if self.stop is not None else _HEARD_S * (rank.code != -signal.SIGKILL)
                        give_up_at = min(give_up_at, time.monotonic() + patience)
            if all(rank.ended is not None for rank in self.ranks):
                return
            if self.stop is None and time.monotonic() > self._join_by:
                self._raise_absent()
            if (why := self._trouble(self.stop)) is not None:
                raise OtherNodeError("the ranks of another node have failed", why=why)
            if time.monotonic() >= give_up_at:
                return
            time.sleep(self._poll_s)

    def _raise_absent(self) -> None:
        absent = [rank for rank in self.ranks if not rank.joining and rank.ended is None]
        if not absent:
            self._join_by = math.inf
            return
        raise RunFailedError(
            f"{ranks_text(rank.rank for rank in absent)} of {len(self.ranks)} did not come to the process group within "
            f"{self._join_s:g} s of the first one",
            where=", ".join(f"process {rank.process.pid}" for rank in absent),
            why="\n".join(self._output.last_lines(absent[0].rank)[-10:]) or "nothing was printed",
            fix="look at what these ranks do before they join; a slow start needs a longer --start-timeout",
        )

    def _announce(self, signum: int) -> None:
        """Answers at once, for all ranks: those that only we end, because one has failed, say nothing of a stop."""
        for rank in self.ranks:
            self._hear(rank)
        if self.run is not None:
            advice = "; again to stop now" if signum == signal.SIGINT else ""
            name = signal.Signals(signum).name
            print(f"{name}: stopping after this step, then saving{advice}", file=self._stderr, flush=True)

    def _hear(self, rank: Rank) -> None:
        """Reads what a rank has reported."""
        for message in read_messages(rank.reports, rank.unread):
            if isinstance(message, Announcement):
                rank.announced = message
                self._output.keep_in(Path(message.run, "logs"))
            elif isinstance(message, Joining):
                rank.joining = True
                self._join_by = min(self._join_by, time.monotonic() + self._join_s)
            elif rank.report is None:
                rank.report = message
                self._output.note(rank.rank, message.text)

    def _end(self, *, failed: bool) -> None:
        """Stops whatever still runs: SIGTERM, a grace, SIGKILL; nothing is left behind.

        Where a rank has failed there is no SIGTERM: to the others it would be a stop, after which a job is started
        again.
        """
        running = [rank for rank in self.ranks if rank.process.poll() is None]
        for rank in running:
            rank.stopped_by_us = True
            rank.process.send_signal(signal.SIGKILL if failed else signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        for rank in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, deadline - time.monotonic()))
        for rank in self.ranks:
            # The process group, also of a rank that has ended: its DataLoader workers may not have noticed yet.
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it is empty
                os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.wait()
            if rank.ended is None:
                rank.ended = time.time()
            self._hear(rank)
            os.close(rank.reports)
        gone_by = time.monotonic() + _GONE_S
        while any(is_left(rank.process.pid) for rank in self.ranks) and time.monotonic() < gone_by:
            time.sleep(0.01)


def is_left(group: int) -> bool:
    """Whether something of a process group still runs; a container may have no process that reaps what has ended."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    stats = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            stats.append(path.read_text().rpartition(")")[2].split())
    return any(own == str(group) and state != "Z" for state, _, own, *_ in stats)


def supervise(
    start: Starter,
    environments: Sequence[Mapping[str, str]],
    *,
    stderr: IO[str],
    output: Output | None = None,
) -> int:
    """Runs one process a rank until all have ended, and returns the exit code of the job.

    SIGTERM or Ctrl-C asks the ranks to save and stop; a second Ctrl-C ends them at once. Where a rank died, the
    `RunFailedError` names it, with its own traceback first.

    Args:
        start: Starts a rank: `spawn(command)`, or `fork(server, function)`.
        environments: One environment a rank; `RANK` in it names the rank.
        stderr: Where the supervisor speaks.
        output: Takes what they print; None: the first rank's streams go to ours.
    """
    numbers = [int(environ["RANK"]) for environ in environments]
    group = Group(start, environments, output or Output(numbers, raw=numbers[0]), stderr=stderr)
    with noted_signals() as received:
        return group.supervise(received)
