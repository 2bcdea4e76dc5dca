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
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO, Final

from fairlead_launch.reports import ALIVE_FD, REPORT_FD, Announcement, read_messages
from fairlead_launch.verdict import Rank, stopped_as_asked, verdict

_POLL_S: Final = 0.05
_HEARD_S: Final = 1.0
"""How long the others may take to report, after the first rank failed: several may fail for a reason of their own."""
_GRACE_S: Final = 5.0
"""How long ranks may take to end by themselves, after SIGTERM, before SIGKILL."""
_STOP_GRACE_S: Final = 30.0
"""The same when the run was asked to stop and a rank died of it: another may be writing the checkpoint."""
_MET_S: Final = 15.0
"""The same when a rank has stopped as asked: it has met the others before, or waited for them in vain."""
_STOPS: Final = (signal.SIGTERM, signal.SIGINT)
_PASSED_ON: Final = (signal.SIGUSR1, signal.SIGUSR2)


def supervise(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    *,
    stderr: IO[str],
    inherited: Sequence[int] = (),
    shared: Sequence[int] = (),
    early: Sequence[int] = (),
) -> int:
    """Runs one process a rank until all have ended, and returns the exit code of the whole.

    SIGTERM or Ctrl-C asks the ranks to save and stop; a second Ctrl-C ends them at once. Where a rank died, the
    `RunFailedError` names it, with its own traceback first.

    Args:
        command: The command of every rank.
        environments: One environment a rank; `RANK` in it names the rank.
        stderr: Where the ranks' failures are shown.
        inherited: File descriptors that rank 0 inherits; they are closed here.
        shared: The same for all ranks.
        early: Signals that came before this.
    """
    alive_read, alive_write = os.pipe()
    ranks: list[Rank] = []
    received = list(early)
    stop: int | None = None

    def note(signum: int, _frame: FrameType | None) -> None:
        received.append(signum)

    previous = {s: signal.signal(s, note) for s in (*_STOPS, *_PASSED_ON)}
    try:
        for index, environ in enumerate(environments):
            fds = (*inherited, *shared) if index == 0 else shared
            ranks.append(_start(command, environ, index, alive_read, fds))
        for fd in (*inherited, *shared):
            os.close(fd)  # with rank 0 its socket goes, and who waits for it is told
        stop = _wait(ranks, received, stderr)
    finally:
        _end(ranks, failed=stop is None and not received)
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        os.close(alive_read)
        os.close(alive_write)
    try:
        return verdict(ranks, stop, stderr)
    finally:
        for rank in ranks:
            if rank.output is not None:
                rank.output.close()


def _start(
    command: Sequence[str], environ: Mapping[str, str], index: int, alive_fd: int, inherited: Sequence[int]
) -> Rank:
    read, write = os.pipe()
    # Two ranks on one terminal write over each other: the first one keeps it.
    output: IO[bytes] | None = tempfile.TemporaryFile() if index > 0 else None  # noqa: SIM115 - read when the rank has ended
    try:
        process = subprocess.Popen(
            command,
            env={**environ, REPORT_FD: str(write), ALIVE_FD: str(alive_fd)},
            stdin=subprocess.DEVNULL,  # reading from the terminal would stop a process that is not in its foreground
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            pass_fds=(write, alive_fd, *inherited),
            process_group=0,
        )
    finally:
        os.close(write)
    os.set_blocking(read, False)
    return Rank(int(environ["RANK"]), process, read, output)


def _wait(ranks: list[Rank], received: list[int], stderr: IO[str]) -> int | None:
    """Returns when all ranks have ended, or one failed and the others had their time; the signal that stopped it."""
    stop: int | None = None
    give_up_at = math.inf
    while True:
        while received:
            signum = received.pop(0)
            if signum == stop == signal.SIGINT:
                # A person asks twice: no more waiting. Schedulers send SIGTERM twice within milliseconds.
                give_up_at = min(give_up_at, time.monotonic() + _GRACE_S)
            if stop is None:
                _announce(ranks, signum, stderr)
            if stop not in _STOPS:
                stop = signum
            for rank in ranks:
                rank.process.send_signal(signum)  # nothing, where it has ended
        for rank in ranks:
            if rank.ended is None and rank.process.poll() is not None:
                rank.ended = time.time()
                _hear(rank)
                if stop is not None and stopped_as_asked(rank.code, rank.report):
                    give_up_at = min(give_up_at, time.monotonic() + _MET_S)
                elif rank.code != 0:
                    give_up_at = min(give_up_at, time.monotonic() + (_HEARD_S if stop is None else _STOP_GRACE_S))
        if all(rank.ended is not None for rank in ranks):
            return stop
        if time.monotonic() > give_up_at:
            return stop
        time.sleep(_POLL_S)


def _announce(ranks: list[Rank], signum: int, stderr: IO[str]) -> None:
    """Answers at once, for all ranks: those that only we end, because one has failed, say nothing of a stop."""
    for rank in ranks:
        _hear(rank)
    if any(rank.announced is not None for rank in ranks):  # there is a run
        again = "; again to stop now" if signum == signal.SIGINT else ""
        print(f"{signal.Signals(signum).name}: stopping after this step, then saving{again}", file=stderr, flush=True)


def _hear(rank: Rank) -> None:
    """Takes in what a rank has said of itself."""
    for message in read_messages(rank.reports):
        if isinstance(message, Announcement):
            rank.announced = message
        elif rank.report is None:
            rank.report = message


def _end(ranks: list[Rank], *, failed: bool) -> None:
    """Stops whatever still runs: SIGTERM, a grace, SIGKILL; nothing is left behind.

    Where a rank has failed there is no SIGTERM: to the others it would be a stop, after which a job is started again.
    """
    running = [rank for rank in ranks if rank.process.poll() is None]
    for rank in running:
        rank.stopped_by_us = True
        rank.process.send_signal(signal.SIGKILL if failed else signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    for rank in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(0.0, deadline - time.monotonic()))
    for rank in ranks:
        # The whole group, also of a rank that has ended: its DataLoader workers may not have noticed yet.
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left in it
            os.killpg(rank.process.pid, signal.SIGKILL)
        rank.process.wait()
        if rank.ended is None:
            rank.ended = time.time()
            _hear(rank)
        os.close(rank.reports)
