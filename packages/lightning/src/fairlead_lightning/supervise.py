"""Starts the ranks of this machine, watches them, and takes all down when one dies.

The supervisor never imports torch.  A rank reports its error through a pipe instead of printing
it, so that what is shown first is the error of the rank that failed first, not the broken
connections that followed on the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Final

from fairlead.errors import RunFailedError

__all__ = ["Report", "keep_log", "send_report", "supervise", "watch_supervisor"]

REPORT_FD: Final = "FAIRLEAD_REPORT_FD"
ALIVE_FD: Final = "FAIRLEAD_ALIVE_FD"

_POLL_S: Final = 0.05
_GRACE_S: Final = 5.0
"""How long ranks may take to end by themselves, after SIGTERM, before SIGKILL."""
_SECONDARY: Final = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe", "Gloo")
"""What a rank says when another one has gone."""


@dataclass(frozen=True)
class Report:
    """What a rank says of its own failure.

    Args:
        rank: Its global rank.
        time: When, seconds since the epoch.
        text: The error as it is shown to the user.
        exit_code: The exit code that it means.
    """

    rank: int
    time: float
    text: str
    exit_code: int

    @property
    def secondary(self) -> bool:
        """Whether it only says that another rank went away."""
        return any(word in self.text for word in _SECONDARY)


def send_report(environ: Mapping[str, str], text: str, exit_code: int) -> bool:
    """Reports a failure to the supervisor; False when there is none, and the caller prints it itself."""
    if REPORT_FD not in environ:
        return False
    report = Report(int(environ.get("RANK", "0")), time.time(), text[-8_000:], exit_code)
    data = json.dumps(asdict(report)).encode() + b"\n"
    with contextlib.suppress(OSError):  # the supervisor has gone: nobody is left to tell
        os.write(int(environ[REPORT_FD]), data)
    return True


def watch_supervisor(environ: Mapping[str, str]) -> None:
    """Ends this rank when its supervisor is gone, however that died; returns at once."""
    if ALIVE_FD not in environ:
        return
    fd = int(environ[ALIVE_FD])

    def wait() -> None:
        while os.read(fd, 1):
            pass  # nothing is ever written: the read returns when the other end is closed
        os._exit(1)

    threading.Thread(target=wait, name="fairlead-supervisor-watch", daemon=True).start()


def keep_log(environ: Mapping[str, str], folder: Path) -> None:
    """Lets the output of a rank other than the first go to `rank-00001.log` from now on.

    Until the run directory is known it goes to a temporary file of the supervisor.  Rank 0 keeps
    the terminal.
    """
    rank = int(environ.get("RANK", "0"))
    if REPORT_FD not in environ or rank == 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / f"rank-{rank:05d}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


@dataclass
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    reports: int
    output: IO[bytes] | None
    ended: float | None = None
    report: Report | None = None


def supervise(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    *,
    stderr: IO[str],
) -> int:
    """Runs one process a rank until all have ended, and returns the exit code of the whole.

    Args:
        command: The command of every rank.
        environments: One environment a rank; `RANK` in it names the rank.
        stderr: Where the ranks' failures are shown.

    Raises:
        RunFailedError: A rank died; it is named, with its own traceback first.
    """
    alive_read, alive_write = os.pipe()
    ranks: list[_Rank] = []
    stopping: list[int] = []

    def forward(signum: int, _frame: FrameType | None) -> None:
        stopping.append(signum)
        for rank in ranks:
            # The terminal has sent SIGINT to the whole process group already.
            if rank.process.poll() is None and signum != signal.SIGINT:
                rank.process.send_signal(signum)

    previous = {s: signal.signal(s, forward) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)}
    try:
        for index, environ in enumerate(environments):
            ranks.append(_start(command, environ, index, alive_read))
        _wait(ranks, stopping)
    finally:
        _end(ranks)
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        os.close(alive_read)
        os.close(alive_write)
    return _verdict(ranks, stopping, stderr)


def _start(command: Sequence[str], environ: Mapping[str, str], index: int, alive_fd: int) -> _Rank:
    read, write = os.pipe()
    # Two ranks on one terminal write over each other: the first one keeps it.
    output: IO[bytes] | None = tempfile.TemporaryFile() if index > 0 else None
    try:
        process = subprocess.Popen(
            command,
            env={**environ, REPORT_FD: str(write), ALIVE_FD: str(alive_fd)},
            stdin=None if index == 0 else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            pass_fds=(write, alive_fd),
        )
    finally:
        os.close(write)
    os.set_blocking(read, False)
    return _Rank(int(environ["RANK"]), process, read, output)


def _wait(ranks: list[_Rank], stopping: list[int]) -> None:
    """Returns when all ranks have ended, or one has failed and the others had time to notice."""
    failed_at: float | None = None
    while True:
        for rank in ranks:
            if rank.ended is None and rank.process.poll() is not None:
                rank.ended = time.time()
                rank.report = _read_report(rank.reports)
                if rank.process.returncode != 0 and failed_at is None:
                    failed_at = time.monotonic()
        if all(rank.ended is not None for rank in ranks):
            return
        # Ranks that fail together are all heard before the rest is stopped.
        if failed_at is not None and not stopping and time.monotonic() - failed_at > 1.0:
            return
        time.sleep(_POLL_S)


def _read_report(fd: int) -> Report | None:
    data = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(fd, 65536):
            data += chunk
    lines = data.splitlines()
    return Report(**json.loads(lines[0])) if lines else None


def _end(ranks: list[_Rank]) -> None:
    """Stops whatever still runs: SIGTERM, a grace, SIGKILL; nothing is left behind."""
    running = [rank for rank in ranks if rank.process.poll() is None]
    for rank in running:
        rank.process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for rank in running:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
    for rank in ranks:
        os.close(rank.reports)


def _verdict(ranks: list[_Rank], stopping: list[int], stderr: IO[str]) -> int:
    failed = [rank for rank in ranks if rank.ended is not None and rank.process.returncode != 0]
    if stopping:
        return 128 + stopping[0]
    if not failed:
        return 0
    first = min(failed, key=_order)
    report = first.report
    if report is not None and report.exit_code != 1:
        # The job, not this rank, is wrong or stopped: every rank says the same, once is enough.
        print(report.text, file=stderr, flush=True)
        return report.exit_code
    others = ", ".join(str(r.rank) for r in ranks if r is not first)
    raise RunFailedError(
        f"rank {first.rank} of {len(ranks)} {_how(first)}",
        where=f"process {first.process.pid}",
        why=report.text if report is not None else _tail(first),
        fix=f"the other ranks ({others}) were stopped; nothing runs any more" if others else None,
    )


def _tail(rank: _Rank) -> str | None:
    """The last lines that a rank wrote before it had a log; what a crash in native code leaves."""
    if rank.output is None:
        return None
    rank.output.seek(0)
    lines = rank.output.read().decode(errors="replace").splitlines()[-20:]
    return "\n".join(lines) or None


def _order(rank: _Rank) -> tuple[int, float]:
    """Sorts the ranks by who failed first; a rank that only lost its peers comes after all others."""
    report = rank.report
    if report is None:
        return (0 if rank.process.returncode < 0 else 1, rank.ended or 0.0)
    return (2, report.time) if report.secondary else (0, report.time)


def _how(rank: _Rank) -> str:
    code = rank.process.returncode
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (out of memory, or killed by hand)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    return "failed" if rank.report is not None else f"ended with exit code {code} and no report"

