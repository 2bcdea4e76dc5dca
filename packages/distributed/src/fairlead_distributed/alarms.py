"""The alarms that a failing rank sends to all others through the store."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final, Literal

from fairlead_distributed.threads import within
from fairlead_runs.mailbox import StoreMailbox

_LONGEST: Final = 8_000  # characters of an error; its ends matter
_DID: Final = {"failed": "failed", "left": "has left the training"}
NO_REPORT: Final = "exited without an error report: killed (out of memory?), or its node died"
_SAY_S: Final = 10.0  # seconds after which a slow wait is reported
_STOPS: Final = (None, 0, 75, 130, 143)  # exit codes of an end, or of a stop that was requested


@dataclass(frozen=True)
class Alarm:
    """What one rank reports to all: `what` is one line, `text` the traceback, `time` seconds since the epoch.

    `kind` is `failed`; `gone`: this rank lost a peer that exited without a report; `hang`: nothing moves;
    `left`: an exception that may yet be caught has led out of the block; `lost`: the store is gone; `over`: the rank
    that may host the store has left as it should.
    """

    kind: Literal["failed", "gone", "hang", "left", "lost", "over"]
    rank: int
    host: str
    what: str
    text: str
    time: float

    @classmethod
    def of_error(cls, rank: int, error: BaseException | str, *, secondary: bool = False) -> Alarm:
        """The failure of this rank; `secondary`: the error says no more than that another rank went away."""
        if isinstance(error, str):
            what, text = error.strip().partition("\n")[0], error
        else:
            what = " ".join(traceback.format_exception_only(error)[-1].split())
            text = "".join(traceback.format_exception(error))
        if len(text) > _LONGEST:
            text = f"{text[: _LONGEST // 2]}\n[...]\n{text[-_LONGEST // 2 :]}"
        if secondary:
            what = f"a rank {NO_REPORT}; rank {rank} noticed: {what}"
        return cls("gone" if secondary else "failed", rank, os.uname().nodename, what[:500], text, time.time())

    @property
    def of_waiting(self) -> bool:
        """Whether ranks timed out waiting for each other: then their collectives say more than an error does."""
        return self.kind == "hang" or "timed out" in self.text.lower() or "timeout" in self.text.lower()

    def __str__(self) -> str:
        if self.kind in ("gone", "lost"):
            return self.what
        return f"rank {self.rank} on {self.host} {_DID.get(self.kind, 'does not move')}: {self.what}"


def is_requested_stop(error: BaseException | None) -> bool:
    """Whether a block ended normally, by Ctrl-C, or with the exit code of a stop."""
    if isinstance(error, SystemExit):
        return error.code in _STOPS
    return error is None or isinstance(error, (KeyboardInterrupt, GeneratorExit))


class Alarms:
    """The alarms of one block, over a mailbox: numbered, each raised once, each acknowledged by all."""

    def __init__(self, mailbox: StoreMailbox) -> None:
        self.mailbox = mailbox

    def read(self, number: int) -> Alarm | None:
        """The alarm of a number; None when it has not come."""
        key = f"alarm/{number}"
        return Alarm(**json.loads(self.mailbox.read([key])[0])) if self.mailbox.has(key) else None

    def acknowledge(self, number: int) -> None:
        """Notes that this rank has handled it."""
        self.mailbox.arrive(f"seen/{number}")

    def leave(self) -> None:
        """Counts this rank out: it will hear nothing more."""
        self.mailbox.arrive("left")

    def put(self, alarm: Alarm, number: int, patience_s: float = 0.0) -> tuple[Alarm, int]:
        """Puts an alarm under a number, for which the caller then rings; returns the one that counts, and its number.

        A rank that came first, or comes within `patience_s`, speaks for all; but a failure is raised also after a
        hang, and after a rank has left.
        """
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and not self.mailbox.has(f"alarm/{number}"):
            time.sleep(0.05)  # a wait that runs out makes torch print four lines
        while True:
            raised = Alarm(**json.loads(self.mailbox.put_first(f"alarm/{number}", json.dumps(asdict(alarm)))))
            if raised == alarm or alarm.kind == "hang" or raised.kind not in ("hang", "left"):
                return raised, number
            number += 1

    def unheard(self, number: int, seconds: float) -> set[int]:
        """The other ranks that have neither acknowledged an alarm nor left after so long; for the raiser."""
        deadline = time.monotonic() + seconds
        while True:
            own = self.mailbox.has(f"seen/{number}/{self.mailbox.rank}") + self.mailbox.has(f"left/{self.mailbox.rank}")
            answers = self.mailbox.count(f"seen/{number}/count", 0) + self.mailbox.count("left/count", 0)
            if answers - own >= self.mailbox.world_size - 1:
                return set()
            if time.monotonic() > deadline:
                missing = set(self.mailbox.missing(f"seen/{number}")) & set(self.mailbox.missing("left"))
                return missing - {self.mailbox.rank}
            time.sleep(0.05)


def trouble_of(seconds: float, call: Callable[..., object], *args: object) -> str | None:
    """Why a call failed, or None: the store or the file system may be gone."""
    try:
        within(seconds, partial(call, *args))
    except Exception as error:  # whatever it is, there is more to do
        return str(error).partition("\n")[0]
    return None


def to_stderr(text: str) -> None:
    """Prints a line for the user, unbuffered."""
    print(text, file=sys.stderr, flush=True)


class SlowWait:
    """Reports once that a wait has taken ten seconds; `text` gives the line to print, or None."""

    def __init__(self, text: Callable[[], str | None]) -> None:
        self._text = text
        self._at = time.monotonic() + _SAY_S

    def look(self) -> None:
        """Called while it is waited."""
        if time.monotonic() >= self._at:
            self._at = math.inf
            text = self._text()
            if text is not None:
                to_stderr(text)


def end_process() -> None:
    """Exits with code 1 from any thread, whatever the main thread is doing."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # full, closed, or there is none
            stream.flush()
    os._exit(1)
