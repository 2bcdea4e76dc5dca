"""Heartbeats: per node one file with a fixed record per local rank, so that ranks never wait for each other.

A record is one line of 128 bytes at offset `128 * local_rank`: rank, step, phase, time, turn, start, host, location,
padding, crc32.  One `pwrite` without fsync writes it, at most once a second, and a thread the last one a second later,
so that the record of a rank that stands still is exact and says where.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

RECORD_BYTES = 128
_CHECK_BYTES = 10  # a space, eight hexadecimal digits, the line's end
_NAME = re.compile(r"node-(\d+)\.txt")
_WORD = re.compile(r"[^\w.:/<>@-]+", re.ASCII)
_STILL_S = 8.0
"""How long a rank has to stand still until its record says where."""


@dataclass(frozen=True)
class Beat:
    """The last sign of life of one rank; `time` is in seconds since the epoch, by that node's clock.

    Attributes:
        phase: What it was doing: `start`, `train`, `validate`, `save`, ...
        turn: How often the phase changed since the step did: all ranks take the same turns, so that of two ranks the
            one with the lower `(step, turn)` is behind.
        start: The number of the start that it belongs to; 0: not known.
        location: Where its code stands, `function@file.py:12`, once it has stood still for eight seconds; else empty.
    """

    rank: int
    node: int
    local_rank: int
    phase: str
    step: int
    time: float
    turn: int = 0
    start: int = 0
    host: str = ""
    location: str = ""


def heartbeat_path(folder: Path, node: int) -> Path:
    """The file of one node."""
    return folder / f"node-{node:05d}.txt"


class Heartbeat:
    """Writes the heartbeat of one rank; cheap enough to call in every step.  Made in the thread that trains.

    At most one record is written in `interval_s`, unless the phase changes; after `still_s` without a beat it says
    where the code stands.  `clock` is for the interval, `now` for the record.  A heartbeat never stops a training:
    `error` says why nothing is written any more.
    """

    def __init__(
        self,
        path: Path,
        local_rank: int,
        rank: int,
        *,
        interval_s: float = 1.0,
        still_s: float = _STILL_S,
        start: int = 0,
        host: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._offset = local_rank * RECORD_BYTES
        self._rank = rank
        self._interval_s = interval_s
        self._still_s = still_s
        self._start = start
        self._host = os.uname().nodename if host is None else host
        self._clock = clock
        self._now = now
        self._thread_id = threading.get_ident()
        self._phase, self._step, self._turn, self._time = "", -1, 0, 0.0
        self._due = float("-inf")
        self._written = ("", -1, 0, 0.0, "")
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._fd: int | None = None
        self.error: OSError | None = None
        self.on_still: Callable[[], object] = _nothing
        """Is called about once a second, in our thread, while the rank stands still."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        except OSError as error:
            self.error = error

    def beat(self, phase: str, step: int) -> None:
        """Says that this rank is alive, in this phase and at this step."""
        at = self._clock()
        if step != self._step:
            self._turn = 0
        elif phase != self._phase:
            self._turn += 1
        due = at >= self._due or phase != self._phase
        self._phase, self._step, self._time = phase, step, self._now()
        if due:
            self._due = at + self._interval_s
            self._write()

    def close(self) -> None:
        """Closes the file, and ends our thread; later beats do nothing.

        The thread must not be the last to hold what `on_still` reaches, a model and its process group: torch frees that
        without the interpreter's lock, and where the interpreter is ending meanwhile, the process would abort.
        """
        self._closed.set()
        self.on_still = _nothing
        with self._lock:
            if self._fd is not None:
                fd, self._fd = self._fd, None
                os.close(fd)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _write(self, location: str = "") -> None:
        """Writes what is new since the last write; in the thread that trains, or in ours."""
        with self._lock:
            last = (self._phase, self._step, self._turn, self._time, location)
            if self._fd is None or last == self._written:
                return
            self._written = last
            words = [str(self._rank), str(self._step), _word(self._phase, 24), f"{self._time:.3f}"]
            words += [str(self._turn), str(self._start), _word(self._host.partition(".")[0], 20)]
            room = RECORD_BYTES - _CHECK_BYTES - len(" ".join(words)) - 1
            words.append(_word(location)[-room:])  # its end says file and line
            try:
                os.pwrite(self._fd, _record(words), self._offset)
            except OSError as error:
                self.error = error
                os.close(self._fd)
                self._fd = None
                self._closed.set()
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="fairlead-heartbeat", daemon=True)
                self._thread.start()

    def _follow(self) -> None:
        """Writes the last beat of a rank that stands still, and where it stands."""
        seen, since = self._time, time.monotonic()
        while not self._closed.wait(self._interval_s):
            if self._time != seen:
                seen, since = self._time, time.monotonic()
            still = time.monotonic() - since >= self._still_s
            self._write(location_of_thread(self._thread_id) if still else "")
            if still:
                self.on_still()


def _nothing() -> None:
    """Nobody wants to know."""


def read_heartbeats(folder: Path) -> list[Beat]:
    """The last beat of every rank, by rank; blank and torn records are left out."""
    beats: list[Beat] = []
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    for name in names:
        if match := _NAME.fullmatch(name):
            data = (folder / name).read_bytes()
            records = (data[at : at + RECORD_BYTES] for at in range(0, len(data), RECORD_BYTES))
            parsed = (_parse(record, int(match[1]), local) for local, record in enumerate(records))
            beats.extend(beat for beat in parsed if beat is not None)
    return sorted(beats, key=lambda beat: (beat.rank, beat.time))


def location_of_thread(thread_id: int | None = None) -> str:
    """Where a thread stands, `function@file.py:12`; None: the main thread."""
    thread_id = threading.main_thread().ident if thread_id is None else thread_id
    assert thread_id is not None  # it has been started
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return "ended"
    code = frame.f_code
    return f"{code.co_name}@{os.path.basename(code.co_filename)}:{frame.f_lineno}"


def _word(text: str, longest: int | None = None) -> str:
    return _WORD.sub("_", text)[:longest] or "-"


def _record(words: Sequence[str]) -> bytes:
    room = RECORD_BYTES - _CHECK_BYTES
    body = " ".join(words).encode("ascii").ljust(room)[:room]
    return body + b" %08x\n" % zlib.crc32(body)


def _parse(record: bytes, node: int, local_rank: int) -> Beat | None:
    body, check = record[:-_CHECK_BYTES], record[-_CHECK_BYTES:]
    if len(record) != RECORD_BYTES or check != b" %08x\n" % zlib.crc32(body):
        return None
    rank, step, phase, when, turn, start, host, location = body.decode("ascii").split()
    return Beat(
        int(rank),
        node,
        local_rank,
        phase,
        int(step),
        float(when),
        int(turn),
        int(start),
        _named(host),
        _named(location),
    )


def _named(word: str) -> str:
    return "" if word == "-" else word
