"""Heartbeats: per node one file with a fixed record per local rank, so that ranks never wait for each other.

A record is one line of 128 bytes at offset `128 * local_rank`: rank, step, phase, time, padding, crc32.  It is
written with one `pwrite`, without fsync: it need not survive a power cut.  `cat` shows it.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RECORD_BYTES", "Beat", "Heartbeat", "heartbeat_path", "read_heartbeats"]

RECORD_BYTES = 128
_CHECK_BYTES = 10  # a space, eight hexadecimal digits, the line's end
_NAME = re.compile(r"node-(\d+)\.txt")
_PHASE = re.compile(r"[^\w.:/-]+")


@dataclass(frozen=True)
class Beat:
    """The last sign of life of one rank.

    Attributes:
        rank: Global rank.
        node: Node rank.
        local_rank: Rank on its node.
        phase: What it was doing: `start`, `train`, `validate`, `save`, ...
        step: The training step.
        time: When, seconds since the epoch, by that node's clock.
    """

    rank: int
    node: int
    local_rank: int
    phase: str
    step: int
    time: float


def heartbeat_path(folder: Path, node: int) -> Path:
    """The file of one node."""
    return folder / f"node-{node:05d}.txt"


class Heartbeat:
    """Writes the heartbeat of one rank; cheap enough to call in every step.

    Args:
        path: `heartbeat_path(folder, node_rank)`; its folder is made when missing.
        local_rank: Rank on this node: which record is written.
        rank: Global rank.
        interval_s: Written at most so often, unless the phase changes.
        clock: Seconds that only go forward, for the interval.
        now: Seconds since the epoch, for the record.

    Attributes:
        error: Why nothing is written any more, or None.  A heartbeat never stops a training.
    """

    def __init__(
        self,
        path: Path,
        local_rank: int,
        rank: int,
        *,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._offset = local_rank * RECORD_BYTES
        self._rank = rank
        self._interval_s = interval_s
        self._clock = clock
        self._now = now
        self._phase = ""
        self._due = float("-inf")
        self._fd: int | None = None
        self.error: OSError | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        except OSError as error:
            self.error = error

    def beat(self, phase: str, step: int) -> None:
        """Says that this rank is alive, in this phase and at this step."""
        at = self._clock()
        if at < self._due and phase == self._phase:
            return
        self._due, self._phase = at + self._interval_s, phase
        if self._fd is None:
            return
        try:
            os.pwrite(self._fd, _record(self._rank, phase, step, self._now()), self._offset)
        except OSError as error:
            self.error = error
            self.close()

    def close(self) -> None:
        """Closes the file; later beats do nothing."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


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


def _record(rank: int, phase: str, step: int, now: float) -> bytes:
    room = RECORD_BYTES - _CHECK_BYTES
    word = _PHASE.sub("_", phase)[:40] or "-"
    body = f"{rank} {step} {word} {now:.3f}".encode("ascii", "replace").ljust(room)[:room]
    return body + b" %08x\n" % zlib.crc32(body)


def _parse(record: bytes, node: int, local_rank: int) -> Beat | None:
    body, check = record[:-_CHECK_BYTES], record[-_CHECK_BYTES:]
    if len(record) != RECORD_BYTES or check != b" %08x\n" % zlib.crc32(body):
        return None
    rank, step, phase, when = body.decode("ascii").split()
    return Beat(int(rank), node, local_rank, phase, int(step), float(when))
