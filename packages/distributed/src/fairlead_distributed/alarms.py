"""What one rank tells all others when it fails, and the keys of the store that carry it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final, Literal

import torch.distributed as dist

__all__ = ["Alarm", "Alarms", "asked_to_stop", "end_process", "to_stderr", "within"]

_LONG: Final = timedelta(days=20)  # torch counts milliseconds in 32 bits
_LONGEST: Final = 8_000  # characters of an error; its ends matter
_STOPS: Final = (None, 0, 75, 130, 143)  # exit codes of an end, or of a stop that was asked for


@dataclass(frozen=True)
class Alarm:
    """What one rank tells all.

    Args:
        kind: `failed`; `hang`: nothing moves; `lost`: the store is gone; `over`: the rank that may host the store has
            left as it should.
        rank: Who tells it.
        host: Its node.
        what: What happened, in one line.
        text: The whole of it: a traceback.
        time: When, seconds since the epoch.
    """

    kind: Literal["failed", "hang", "lost", "over"]
    rank: int
    host: str
    what: str
    text: str
    time: float

    @classmethod
    def of_error(cls, rank: int, error: BaseException | str) -> Alarm:
        """The failure of this rank."""
        if isinstance(error, str):
            what, text = error.strip().partition("\n")[0], error
        else:
            what = " ".join(traceback.format_exception_only(error)[-1].split())
            text = "".join(traceback.format_exception(error))
        if len(text) > _LONGEST:
            text = f"{text[: _LONGEST // 2]}\n[...]\n{text[-_LONGEST // 2 :]}"
        return cls("failed", rank, os.uname().nodename, what[:500], text, time.time())

    @property
    def of_waiting(self) -> bool:
        """Whether ranks waited for each other in vain: then their collectives say more than an error does."""
        return self.kind == "hang" or "timed out" in self.text.lower() or "timeout" in self.text.lower()

    def __str__(self) -> str:
        """In one line: who and what."""
        if self.kind == "lost":
            return self.what
        return f"rank {self.rank} on {self.host} {'failed' if self.kind == 'failed' else 'does not move'}: {self.what}"


def asked_to_stop(error: BaseException | None) -> bool:
    """Whether a block ended as it should: by itself, by Ctrl-C, or with the exit code of an end or a stop."""
    if isinstance(error, SystemExit):
        return error.code in _STOPS
    return error is None or isinstance(error, (KeyboardInterrupt, GeneratorExit))


class Alarms:
    """The alarms of one block in a store: numbered, each told once, each acknowledged by all.

    Every rank waits for a key of its own, so that it can also be woken by itself, and leave.

    Args:
        store: A client of the store for the calling thread, with a prefix for this block.
        rank: This rank.
        world_size: The number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size

    def wait(self, number: int) -> None:
        """Blocks until the alarm comes, or `wake`.

        Raises:
            RuntimeError: The store went away.
        """
        self.store.wait([f"wake/{number}/{self.rank}"], _LONG)

    def wake(self, number: int) -> None:
        """Ends this rank's own wait, and counts it out."""
        self.store.set(f"left/{self.rank}", "")
        self.store.add("left", 1)
        for each in (number, number + 1):  # the thread may just have begun to wait for the next one
            self.store.set(f"wake/{each}/{self.rank}", "")

    def read(self, number: int) -> Alarm:
        """The alarm of a number, once it came."""
        return Alarm(**json.loads(self.store.get(f"alarm/{number}")))

    def acknowledge(self, number: int) -> None:
        """Says that this rank has heard it and done what it wanted to."""
        self.store.set(f"seen/{number}/{self.rank}", "")
        self.store.add(f"seen/{number}", 1)

    def claim(self, alarm: Alarm, number: int, patience_s: float = 0.0) -> int | Alarm:
        """The number under which this rank may tell an alarm; or the alarm of a rank that was first and speaks for all.

        Args:
            alarm: What this rank has to tell.
            number: The next number, as far as this rank knows.
            patience_s: How long another rank may come first.
        """
        if patience_s > 0:
            with contextlib.suppress(RuntimeError):  # nobody came, or the store is gone, which the next call says
                self.store.wait([f"alarm/{number}"], timedelta(seconds=patience_s))
        while self.store.add(f"claim/{number}", 1) > 1:
            self.store.wait([f"alarm/{number}"], timedelta(seconds=10))
            other = self.read(number)
            if alarm.kind == "hang" or other.kind != "hang":
                return other
            number += 1
        return number

    def tell(self, alarm: Alarm, number: int) -> None:
        """Wakes all ranks, to hear the alarm that was claimed."""
        self.store.set(f"alarm/{number}", json.dumps(asdict(alarm)))
        keys = [f"wake/{number}/{rank}" for rank in range(self.world_size)]
        self.store.multi_set(keys, [""] * len(keys))  # type: ignore[attr-defined]  # not in torch's stubs

    def unheard(self, number: int, seconds: float) -> list[int]:
        """The other ranks that have neither heard an alarm nor left after so long; only the teller asks."""
        deadline = time.monotonic() + seconds
        others = self.world_size - 1
        while self._answers(number) < others:
            if time.monotonic() > deadline:
                return [
                    rank for rank in range(self.world_size) if rank != self.rank and not self._answered(number, rank)
                ]
            time.sleep(0.05)
        return []

    def _answers(self, number: int) -> int:
        own = self.store.check([f"seen/{number}/{self.rank}"]) + self.store.check([f"left/{self.rank}"])
        return self.store.add(f"seen/{number}", 0) + self.store.add("left", 0) - own

    def _answered(self, number: int, rank: int) -> bool:
        return self.store.check([f"seen/{number}/{rank}"]) or self.store.check([f"left/{rank}"])


def within(seconds: float, call: Callable[..., object], *args: object) -> str | None:
    """Calls something that may never return, for a store or a file system that is gone; why it failed, or None.

    After so many seconds it goes on in a thread that nobody waits for.
    """

    def run() -> None:
        try:
            call(*args)
        except (RuntimeError, OSError) as error:
            failures.append(str(error).partition("\n")[0])

    failures: list[str] = []
    thread = threading.Thread(target=run, name="fairlead-watch-call", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return f"no answer within {seconds:g} s"
    return failures[0] if failures else None


def to_stderr(text: str) -> None:
    """What a person should read, at once."""
    print(text, file=sys.stderr, flush=True)


def end_process() -> None:
    """Ends this process as failed, from any thread, whatever its main thread is in."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
