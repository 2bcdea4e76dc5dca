"""What `fairlead checkpoint verify` has found out of a checkpoint, and how far it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from fairlead_checkpoint_io.commands.rows import size_text
from fairlead_runs.commit import Syscalls

__all__ = ["Bytes", "Checked", "Task"]

_REDRAW_S: Final = 0.1
_WIDTH: Final = 30


@dataclass
class Checked:
    """What was found out of one checkpoint; of one on a store, `path` is its name only."""

    path: Path
    url: str | None = None
    files: int = 0
    size: int = 0
    damage: list[dict[str, str]] = field(default_factory=list)
    note: str = ""


Task = tuple[Checked, Callable[["Bytes"], str | None], str]
"""What is read: of which checkpoint, the call that gives the problem, the file's name."""


class Bytes(Syscalls):
    """Counts what is read, for the progress bar.

    Args:
        total: Bytes in all.
        stream: A terminal; None: no bar.
    """

    def __init__(self, total: int, stream: IO[str] | None) -> None:
        self._total, self._stream = total, stream
        self._done, self._drawn = 0, 0.0
        self._lock = threading.Lock()

    def readinto(self, fd: int, buffer: memoryview) -> int:
        """As `Syscalls.readinto`."""
        count = super().readinto(fd, buffer)
        self.add(count)
        return count

    def add(self, count: int) -> None:
        """Counts bytes; redraws a bar on a terminal, ten times a second at most."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if self._stream is not None and now - self._drawn >= _REDRAW_S:
                self._drawn = now
                part = min(1.0, self._done / self._total) if self._total else 1.0
                bar = "#" * int(part * _WIDTH)
                done = f"{size_text(self._done)} of {size_text(self._total)}"
                print(f"\r[{bar:<{_WIDTH}}] {part:4.0%} {done} ", end="", file=self._stream, flush=True)

    def close_bar(self) -> None:
        """Takes the bar off the terminal."""
        if self._stream is not None:
            print(f"\r{'':<{_WIDTH + 40}}\r", end="", file=self._stream, flush=True)
