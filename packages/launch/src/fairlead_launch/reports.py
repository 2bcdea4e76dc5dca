"""What a rank tells its supervisor, through a pipe: where the run is, and how it failed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from fairlead.errors import FairleadError, UserCodeError

REPORT_FD: Final = "FAIRLEAD_REPORT_FD"
ALIVE_FD: Final = "FAIRLEAD_ALIVE_FD"

_LONGEST: Final = 8_000
"""Characters of an error that are sent."""
_SECOND_S: Final = 2.0
"""How long another rank lets rank 0 speak first."""
_SECONDARY: Final = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "gloo/transport",
    "ncclRemoteError",
    "ncclSystemError",
    "DistBackendError",
    "DistNetworkError",
    "went away while rank",
)
"""What a rank says when another one has gone."""


@dataclass(frozen=True)
class Report:
    """What a rank reports of its failure: the error as the user sees it, and the exit code that it means.

    `lost_a_peer`: the error says no more than that another rank went away.
    """

    rank: int
    time: float
    text: str
    exit_code: int
    lost_a_peer: bool = False


@dataclass(frozen=True)
class Announcement:
    """Where the run of a rank is, once it is known, and the number of this start of it."""

    run: str
    start: int


@dataclass(frozen=True)
class Joining:
    """A rank has come to the process group, and waits for the others."""

    rank: int


def lost_a_peer(error: BaseException) -> bool:
    """Whether an error only says that another rank went away: torch's and ours do, a user's own connection does not."""
    return isinstance(error, (RuntimeError, FairleadError)) and any(word in str(error) for word in _SECONDARY)


def send_report(environ: Mapping[str, str], text: str, exit_code: int, *, lost_a_peer: bool = False) -> bool:
    """Reports a failure to the supervisor; False when there is none, and the caller prints it itself."""
    if len(text) > _LONGEST:  # its ends matter: the user's own frame, and what was raised
        text = f"{text[: _LONGEST // 2]}\n[...]\n{text[-_LONGEST // 2 :]}"
    return _send(environ, Report(int(environ.get("RANK", "0")), time.time(), text, exit_code, lost_a_peer))


def leave_to_rank_0(error: FairleadError, rank: int) -> None:
    """Notes that rank 0 meets the same error and shows it: another rank prints one line, also if it is uncaught."""
    if rank == 0:
        return
    vars(error)["other_rank"] = rank
    _shown_by(error, shown_after_rank_0)


def show_without_traceback(error: FairleadError) -> None:
    """Has Python show an error as a command does, where no script catches it: its block says it all."""

    def show(error: FairleadError) -> bool:
        print(f"error: {error.block()}", file=sys.stderr, flush=True)
        return True

    _shown_by(error, show)


def _shown_by(error: FairleadError, show: Callable[[FairleadError], bool]) -> None:
    """Has `show` show it instead of Python's traceback, unless it returns False."""
    earlier = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, traceback: TracebackType | None) -> None:
        if raised is not error or not show(error):
            earlier(kind, raised, traceback)

    sys.excepthook = hook


def shown_after_rank_0(error: FairleadError) -> bool:
    """Says in one line what was left to rank 0; False where nothing was.

    A launcher that ends all ranks with the first one must not end rank 0 before it has spoken, and mostly ends this one
    before its line.
    """
    rank = vars(error).get("other_rank")
    if rank is None:
        return False
    time.sleep(_SECOND_S)
    where = (error.why or "").rpartition("\n")[2].strip() if isinstance(error, UserCodeError) else error.where
    line = f"rank {rank} on {os.uname().nodename}: {error.what}{f' ({where})' if where else ''}; rank 0 says more"
    print(line, file=sys.stderr, flush=True)
    return True


def announce_run(environ: Mapping[str, str], run: Path, start: int) -> bool:
    """Tells the supervisor where this rank's run is: it keeps what the ranks print there. False: there is none."""
    return _send(environ, Announcement(str(run), start))


def watch_supervisor(environ: Mapping[str, str]) -> None:
    """Ends this rank, and what it has started, when its supervisor is gone, however that died; returns at once."""
    if ALIVE_FD not in environ:
        return
    fd = int(environ[ALIVE_FD])

    def wait() -> None:
        while os.read(fd, 1):
            pass  # nothing is ever written: the read returns when the other end is closed
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, name="fairlead-supervisor-watch", daemon=True).start()


def read_messages(fd: int, rest: bytearray) -> list[Report | Announcement | Joining]:
    """What a rank has sent since the last time, in order; never waits. Half a message stays in `rest`."""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(fd, 65536):
            rest += chunk
    kinds = {kind.__name__: kind for kind in (Report, Announcement, Joining)}
    messages: list[Report | Announcement | Joining] = []
    *lines, half = rest.split(b"\n")
    rest[:] = half
    for line in lines:
        kind, fields = json.loads(line)
        messages.append(kinds[kind](**fields))
    return messages


def say_joining(environ: Mapping[str, str]) -> None:
    """Tells the supervisor that this rank has come to the process group."""
    _send(environ, Joining(int(environ.get("RANK", "0"))))


def _send(environ: Mapping[str, str], message: Report | Announcement | Joining) -> bool:
    if REPORT_FD not in environ:
        return False
    data = json.dumps([type(message).__name__, asdict(message)]).encode() + b"\n"
    with contextlib.suppress(OSError):  # the supervisor has gone
        os.write(int(environ[REPORT_FD]), data)
    return True
