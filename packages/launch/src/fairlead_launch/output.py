"""What ranks print: logged in one file each, with time and rank, and shown on the terminal, equal lines only once.

A thread copies from a pipe for each stream, so that what native code prints and a rank's last words are there, too. A
stream that is shown as it comes gets a terminal where ours is one, for progress bars.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import pty
import re
import selectors
import shutil
import sys
import termios
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO, cast

from fairlead_runs.waiting import ranks_text

_EQUAL_S: Final = 0.3
"""How long a line waits for the same line of other ranks."""
_HELD: Final = 1 << 16
"""Characters of a rank that are held until it is known where its log is."""
_SETTLE_S: Final = 20.0
"""How long to wait for the log folder to be announced: a script may open a run."""
_LONGEST: Final = 1 << 16
"""Bytes of a line; a longer one is cut into several."""
_LAST: Final = 1 << 20
"""Bytes of a log in which its last lines are looked for."""
_LEVEL: Final = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)[: ]")
_STYLE: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""What a progress bar sends to a terminal to move and to colour."""
_NAMES: Final = {1: "INFO", 2: "WARNING"}
"""The level of a line that does not begin with one, by the stream it came from."""


def log_name(rank: int) -> str:
    """The file name of a rank's log."""
    return f"rank-{rank:05d}.log"


def log_line(text: str, rank: int, stream: int, when: float | None = None) -> str:
    """A line of a log, in the form of `%(asctime)s [Rank N] LEVEL: message`.

    Example:
        >>> log_line("ERROR: no luck", 3, 2, 0.25)[19:]
        ',250 [Rank 3] ERROR: no luck\\n'
    """
    at = datetime.datetime.fromtimestamp(time.time() if when is None else when)
    level = "" if _LEVEL.match(text) else f"{_NAMES.get(stream, 'INFO')}: "
    return f"{at:%Y-%m-%d %H:%M:%S},{at.microsecond // 1000:03d} [Rank {rank}] {level}{text}\n"


def clean_line(line: str) -> str:
    """A line without colours and movements; of what a progress bar has written over itself, the last."""
    return _STYLE.sub("", line.rstrip("\r").rpartition("\r")[2])


@dataclass
class _Stream:
    """One stream of one rank; `shown`: it goes to ours as it comes."""

    rank: int
    number: int
    shown: bool
    rest: bytes = b""


@dataclass
class _Log:
    """The log of one rank; what this start has printed follows `begin`, in bytes."""

    rank: int
    held: list[str] = field(default_factory=list)
    size: int = 0
    fd: int | None = None
    path: Path | None = None
    begin: int = 0
    lost: bool = False


@dataclass
class _Line:
    """A line that waits until `until` for the same one of other ranks."""

    until: float
    ranks: list[int] = field(default_factory=list)


class Output:
    """Takes in what the ranks of this machine print, from when it is made until `close`.

    Args:
        ranks: The ranks of this machine.
        raw: The rank whose streams go to ours as they are; None: all that are shown come line by line, with their rank.
        shown: The ranks whose lines are shown.
        folder: Where the logs are; None: not known yet (`keep_in`), and what comes is held.
        fallback: Where they go if no folder is announced within some seconds; None: only the last lines are held.
    """

    def __init__(
        self,
        ranks: Collection[int],
        *,
        raw: int | None,
        shown: Collection[int] = (),
        folder: Path | None = None,
        fallback: Path | None = None,
    ) -> None:
        self._raw = raw
        self._shown = frozenset(shown) - {raw}
        self._logs = {rank: _Log(rank) for rank in ranks}
        self._folder = folder
        self._fallback = fallback
        self._settle_at = time.monotonic() + _SETTLE_S
        self._lines: dict[tuple[str, int], _Line] = {}
        """What waits, in the order in which it came: a text, and the how many-th of its kind it is."""
        self._first: dict[str, int] = {}
        self._next: dict[tuple[str, int], int] = {}
        """Of a text that waits, the number of its first line that does, and of the next that a rank will print."""
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._closing: float | None = None
        self._broken: set[int] = set()
        self._thread = threading.Thread(target=self._copy, name="fairlead-output", daemon=True)
        self._thread.start()

    def streams(self, rank: int) -> tuple[int, int]:
        """The file descriptors that a rank gets for its standard output and error; the caller closes them."""
        return self._open(rank, 1), self._open(rank, 2)

    def keep_in(self, folder: Path) -> None:
        """Says where the logs are, once."""
        with self._lock:
            if self._folder is None:
                self._folder = folder
                for log in self._logs.values():
                    self._write(log, [])

    def note(self, rank: int, text: str) -> None:
        """Writes to a rank's log what it has reported, which it has not printed."""
        with self._lock:
            self._write(self._logs[rank], [log_line(f"ERROR: {line}", rank, 2) for line in text.splitlines()])

    def path(self, rank: int) -> Path | None:
        """The log of a rank, if it has one."""
        return self._logs[rank].path

    def last_lines(self, rank: int) -> list[str]:
        """What a rank of this start has printed last, without times."""
        log = self._logs[rank]
        if log.path is None:
            lines = "".join(log.held).splitlines()
        else:
            try:
                with log.path.open("rb") as file:
                    file.seek(max(log.begin, file.seek(0, os.SEEK_END) - _LAST))
                    lines = file.read(_LAST).decode(errors="replace").splitlines()[-400:]
            except OSError as error:
                return [f"its log cannot be read: {error}"]
        head = re.compile(rf"[-\d]+ [:\d]+,\d+ \[Rank {rank}\] (?:(?:INFO|WARNING): )?")
        return [head.sub("", line, count=1) for line in lines]

    def close(self, patience_s: float = 1.0) -> None:
        """Takes in what is left, for as long as somebody may still print."""
        self._closing = time.monotonic() + patience_s
        os.write(self._wake_write, b"x")
        self._thread.join(patience_s + 5)
        for log in self._logs.values():
            if log.fd is not None:
                os.close(log.fd)
                log.fd = None
        self._selector.close()
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)

    def _open(self, rank: int, number: int) -> int:
        shown = rank == self._raw
        ours = (sys.stdout, sys.stderr)[number - 1]
        if shown and ours is not None and ours.isatty():
            read, write = pty.openpty()
            settings = termios.tcgetattr(write)
            settings[1] &= ~termios.OPOST  # the terminal that it goes to does that
            termios.tcsetattr(write, termios.TCSANOW, settings)
            size = shutil.get_terminal_size()
            termios.tcsetwinsize(write, (size.lines, size.columns))
        else:
            read, write = os.pipe()
        with self._lock:
            self._selector.register(read, selectors.EVENT_READ, _Stream(rank, number, shown))
        os.write(self._wake_write, b"x")
        return write

    def _copy(self) -> None:
        while True:
            with self._lock:
                until = min((line.until for line in self._lines.values()), default=self._settle_at)
                wait = min(60.0, min(until, self._settle_at) - time.monotonic())
                open_streams = len(self._selector.get_map()) - 1
            if self._closing is not None:
                if not open_streams or time.monotonic() >= self._closing:
                    break
                wait = min(wait, self._closing - time.monotonic())
            for key, _ in self._selector.select(max(0.0, wait)):
                if key.data is None:
                    os.read(self._wake_read, 4096)
                else:
                    self._take(key.fd, key.data)
            self._flush()
            if time.monotonic() >= self._settle_at:
                self._settle()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._finish(key.fd, key.data)
        self._flush(everything=True)
        self._settle()

    def _settle(self) -> None:
        """Takes the fallback: no log folder was announced."""
        self._settle_at = math.inf
        if self._fallback is not None:
            self.keep_in(self._fallback)

    def _take(self, fd: int, stream: _Stream) -> None:
        try:
            data = os.read(fd, 1 << 16)
        except OSError:  # a terminal says so when its last writer has gone
            data = b""
        if not data:
            self._finish(fd, stream)
            return
        if stream.shown:
            self._show(stream.number, data)
        *lines, stream.rest = (stream.rest + data).split(b"\n")
        if len(stream.rest) > _LONGEST:
            lines, stream.rest = [*lines, stream.rest], b""
        self._add(stream, lines)

    def _finish(self, fd: int, stream: _Stream) -> None:
        with self._lock:
            self._selector.unregister(fd)
        os.close(fd)
        if stream.rest:
            self._add(stream, [stream.rest])

    def _add(self, stream: _Stream, lines: list[bytes]) -> None:
        texts = [clean_line(line.decode(errors="replace")) for line in lines]
        with self._lock:
            self._write(self._logs[stream.rank], [log_line(text, stream.rank, stream.number) for text in texts])
        if stream.rank in self._shown:
            for text in texts:
                self._collect(stream.rank, text)

    def _write(self, log: _Log, lines: list[str]) -> None:
        """Writes to a rank's log, or holds it; one that cannot be written is given up, with a word, never the rank."""
        log.held += lines
        if self._folder is None:
            log.size += sum(map(len, lines))
            if log.size > _HELD and self._fallback is not None:
                self._folder = self._fallback
            while log.size > _HELD and self._folder is None:
                log.size -= len(log.held.pop(0))
        if self._folder is None:
            return
        if log.lost:
            log.held.clear()
            return
        try:
            if log.fd is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                log.path = self._folder / log_name(log.rank)
                log.fd = os.open(log.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                log.begin = os.lseek(log.fd, 0, os.SEEK_END)
            data = memoryview("".join(log.held).encode())
            while data:
                data = data[os.write(log.fd, data) :]
            log.held.clear()
        except OSError as error:
            log.lost = True
            self._show(2, f"the log of rank {log.rank} cannot be written any more: {error}\n".encode())

    def _collect(self, rank: int, text: str) -> None:
        number = max(self._next.get((text, rank), 0), self._first.setdefault(text, 0))
        self._next[text, rank] = number + 1
        self._lines.setdefault((text, number), _Line(time.monotonic() + _EQUAL_S)).ranks.append(rank)

    def _flush(self, *, everything: bool = False) -> None:
        """Shows the lines that wait for no rank any more, in the order in which they came."""
        now = time.monotonic()
        shown = []
        for (text, number), line in list(self._lines.items()):
            if not everything and len(line.ranks) < len(self._shown) and now < line.until:
                break
            del self._lines[text, number]
            self._first[text] = number + 1
            if (text, number + 1) not in self._lines:  # none of its kind waits any more
                del self._first[text]
                for rank in self._shown:
                    self._next.pop((text, rank), None)
            shown.append(f"[{ranks_text(sorted(line.ranks))}] {text}\n")
        if shown:
            self._show(1, "".join(shown).encode())

    def _show(self, number: int, data: bytes) -> None:
        """Writes to our own stream; if its reader is gone, only the logs continue."""
        ours = (sys.stdout, sys.stderr)[number - 1]
        if ours is None or number in self._broken:
            return
        try:
            fd = ours.fileno()
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                ours.flush()
            self._broken.add(number)


class _Kept:
    """A stream that also writes its lines to a log; a log that cannot be written ends nothing."""

    def __init__(self, stream: Any, log: TextIO, rank: int, number: int) -> None:
        self._stream = stream
        self._log: TextIO | None = log
        self._rank = rank
        self._number = number
        self._rest = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """Writes to both."""
        written = self._stream.write(text)
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                self._keep(line)
        return int(written or len(text))

    def writelines(self, lines: Any) -> None:
        """Writes to both."""
        for line in lines:
            self.write(line)

    def _keep(self, line: str) -> None:
        if self._log is not None:
            try:
                self._log.write(log_line(clean_line(line), self._rank, self._number))
            except (OSError, ValueError):  # a full disk; what is printed is still where the launcher leaves it
                self._log = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def copy_output(folder: Path, rank: int) -> None:
    """From now on keeps a copy of what this process prints to `sys.stdout` and `sys.stderr` in `folder`.

    What native code prints, and who holds an earlier stream, is not seen. A second call changes nothing.
    """
    if isinstance(sys.stdout, _Kept):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log = (folder / log_name(rank)).open("a", buffering=1, errors="replace")
    except OSError as error:  # no reason not to train
        print(f"the output of rank {rank} is not saved: {error}", file=sys.stderr)
        return
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is not None:
            setattr(sys, name, cast("TextIO", _Kept(stream, log, rank, number)))
