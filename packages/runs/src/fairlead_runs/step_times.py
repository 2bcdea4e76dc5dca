"""Where the time of each rank goes: data wait, forward, backward, optimizer, logging, and all that is not a step.

`StepTimes` books every moment of one rank into one part, and writes the sums into the run directory every ten seconds:
per node one file with a fixed record per rank, as heartbeats are, so that ranks never wait for each other.  Rank 0
appends a line for each period to a series besides.  Torch-free: a login node reads it.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = "times"
RECORD_BYTES: Final = 1536
_CHECK_BYTES: Final = 10  # a space, eight hexadecimal digits, the line's end
_NAME: Final = re.compile(r"node-(\d+)\.txt")

STEP_PARTS: Final = ("data", "forward", "backward", "compute", "optimizer", "logging")
"""The parts of an optimizer step: waiting for the batch; the passes, or `compute` where an engine cannot tell them
apart; the optimizer; and what follows (callbacks, loggers, the loop's own code)."""
FIRST_STEP: Final = "first-step"
"""All of a start's first step: it compiles, fills caches and starts workers."""
_OTHER: Final = "other"
_MOST_PARTS: Final = 24
_LONGEST: Final = 16
"""Characters of a phase's name: a record holds them all."""
_SERIES_SHARE: Final = 500
"""Periods grow with the start, so that its series has a few thousand lines at most."""


@dataclass(frozen=True)
class Period:
    """What one rank did in a period.

    Attributes:
        time: Its end, in seconds since the epoch.
        step: The optimizer step at its end.
        steps: Optimizer steps in it.
        seconds: Seconds by part.
    """

    time: float
    step: int
    steps: int
    seconds: Mapping[str, float]

    @property
    def step_s(self) -> float | None:
        """Seconds a step; None: there was none."""
        return sum(self.seconds.get(part, 0.0) for part in STEP_PARTS) / self.steps if self.steps else None


@dataclass(frozen=True)
class RankTimes:
    """Where the time of one rank went in one start.

    Attributes:
        time: When it was written, in seconds since the epoch.
        steps: Optimizer steps that are measured: all but the start's first.
        seconds: Seconds by part, since the rank joined the run: those of `STEP_PARTS`, `first-step`, and the phases of
            its heartbeat.
        mean_s: The mean of a step, in seconds, with its standard deviation and the longest.
        recent: The last period.
        facts: What the engine has measured: `comm_s` (seconds of a step that wait for communication), `comm_bytes` (to
            send in each step), `device_memory` and `host_memory` (bytes, the most so far and now), `workers`, `pinned`
            of the loader, `device.PART` (seconds by part as the device saw them, in `device_steps` sampled steps).
    """

    rank: int
    node: int
    host: str
    start: int
    time: float
    step: int
    steps: int
    seconds: Mapping[str, float]
    mean_s: float | None
    sd_s: float
    max_s: float
    recent: Period
    facts: Mapping[str, float]

    @property
    def shares(self) -> dict[str, float]:
        """The share of each part in a step, with the waiting for communication apart from the pass that it is in.

        Of a GPU, which works on while the host goes ahead, they are what the device saw.
        """
        device = {part: self.facts.get(f"device.{part}", 0.0) for part in STEP_PARTS}
        steps = self.facts.get("device_steps", 0.0)
        found = device if steps else {part: self.seconds.get(part, 0.0) for part in STEP_PARTS}
        waits = self.facts.get("comm_s", 0.0) * (steps or self.steps)
        inside = "backward" if found["backward"] else "compute"
        found["communication"] = min(waits, found[inside])
        found[inside] -= found["communication"]
        total = sum(found.values())
        return {part: value / total for part, value in found.items() if value} if total else {}

    @property
    def own_s(self) -> float | None:
        """Seconds of a step that this rank did not wait for others: what tells a slow rank from those that wait."""
        if self.mean_s is None:
            return None
        return self.mean_s * (1 - self.shares.get("communication", 0.0))


class StepTimes:
    """Books the time of one rank; `at` and `beat` cost well under a microsecond each.  Used by one thread.

    It never stops a training: `error` says why nothing is written any more.

    Args:
        folder: Of this start, `times_folder(run, start)`.
        facts: Gives what the engine has measured, each time the sums are written; see `RankTimes.facts`.
        interval_s: Seconds between two writes.

    Example:
        >>> times = StepTimes(folder, node=0, local_rank=0, rank=0)  # doctest: +SKIP
        >>> times.at("data")  # doctest: +SKIP
        >>> times.at("forward")  # doctest: +SKIP
        >>> times.beat("train", 1)  # doctest: +SKIP
    """

    def __init__(
        self,
        folder: Path,
        *,
        node: int,
        local_rank: int,
        rank: int,
        host: str | None = None,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.facts: Callable[[], Mapping[str, float]] = dict
        self.on_part: Callable[[str], object] | None = None
        """Called with each part that begins."""
        self.on_write: Callable[[RankTimes], object] | None = None
        """Called with what was written, each time."""
        self.error: OSError | None = None
        self._start = int(folder.name.rpartition("-")[2])
        self._node = node
        self._who = {"rank": rank, "host": (os.uname().nodename if host is None else host).partition(".")[0][:40]}
        self._offset = local_rank * RECORD_BYTES
        self._interval_s, self._clock, self._now = interval_s, clock, now
        self._seconds: dict[str, float] = defaultdict(float)
        self._part = "setup"
        self._since = self._began = self._written = self._written_still = clock()
        self._step = -1
        self._stepped_at = 0.0  # of the seconds in steps
        self._steps, self._sum, self._squares, self._max = 0, 0.0, 0.0, 0.0
        self._facts: dict[str, float | None] = {}
        self._before: tuple[int, dict[str, float]] = (0, {})
        self._recent = Period(now(), 0, 0, {})
        self._series = folder / "series.jsonl" if rank == 0 else None
        self._series_since: tuple[float, int, dict[str, float]] = (self._began, 0, {})
        self._fd: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(folder / f"node-{node:05d}.txt", os.O_WRONLY | os.O_CREAT, 0o666)
        except OSError as error:
            self.error = error

    def at(self, part: str) -> None:
        """What this rank does from now on."""
        now = self._clock()
        self._seconds[self._part] += now - self._since
        self._part, self._since = part, now
        if self.on_part is not None:
            self.on_part(part)

    def beat(self, phase: str, step: int) -> None:
        """A heartbeat: what is no step is booked under its phase, and a new step is counted."""
        if phase == "train":
            if self._part not in STEP_PARTS:
                self.at("logging")
        elif phase == "first-batch":
            self.at("data")
        elif phase != self._part:
            phase = phase[:_LONGEST]
            self.at(phase if phase in self._seconds or len(self._seconds) < _MOST_PARTS else _OTHER)
        if step != self._step:
            if phase == "train" and step > self._step >= 0:
                self._count(step - self._step)
            self._step = step
        if self._clock() - self._written >= self._interval_s:
            self.write()

    def _count(self, steps: int) -> None:
        self.at(self._part)
        seconds = self._seconds
        # Written out: a loop over the parts would take as long as all else here.
        spent = seconds["data"] + seconds["forward"] + seconds["backward"]
        spent += seconds["compute"] + seconds["optimizer"] + seconds["logging"]
        if FIRST_STEP not in seconds:
            for part in STEP_PARTS:
                seconds.pop(part, None)
            seconds[FIRST_STEP] = spent
            self._stepped_at = 0.0
            return
        one = (spent - self._stepped_at) / steps
        self._stepped_at = spent
        self._steps += steps
        self._sum += one * steps
        self._squares += one * one * steps
        self._max = max(self._max, one)

    def write(self) -> None:
        """Writes the sums so far."""
        self.at(self._part)
        self._written = self._since
        if self._fd is None:
            return
        seconds = dict(self._seconds)
        steps, before = self._before
        self._recent = Period(self._now(), self._step, self._steps - steps, _difference(seconds, before))
        self._before = (self._steps, seconds)
        self._facts = {name: _short(value) for name, value in self.facts().items()}
        record = self._record(seconds)
        try:
            os.pwrite(self._fd, _record(record), self._offset)
            if self._series is not None:
                self._append_period(seconds)
        except OSError as error:
            self.error = error
            self.close(last=False)
        if self.on_write is not None:
            self.on_write(_times(record, self._node, self._start))

    def write_still(self) -> None:
        """Writes where this rank stands, from another thread: the one that trains is stuck, perhaps for good.

        It changes nothing, as that thread may wake at any moment, and asks the engine nothing, which may hold a lock.
        """
        fd, now = self._fd, self._clock()
        if fd is None or now - max(self._written, self._written_still) < self._interval_s:
            return
        self._written_still = now
        seconds = dict(self._seconds)
        seconds[self._part] = seconds.get(self._part, 0.0) + now - self._since
        with suppress(OSError):  # the thread that trains says so
            os.pwrite(fd, _record({**self._record(seconds), "time": round(self._now(), 3)}), self._offset)

    def _record(self, seconds: Mapping[str, float]) -> dict[str, Any]:
        mean = self._sum / self._steps if self._steps else None
        spread = math.sqrt(max(0.0, self._squares / self._steps - mean * mean)) if mean is not None else 0.0
        return {
            **self._who,
            "time": round(self._recent.time, 3),
            "step": self._step,
            "steps": self._steps,
            "mean": _short(mean),
            "sd": _short(spread),
            "max": _short(self._max),
            "s": _shorter(seconds),
            "recent": [self._recent.steps, _shorter(self._recent.seconds)],
            "facts": self._facts,
        }

    def _append_period(self, seconds: dict[str, float]) -> None:
        since, steps, before = self._series_since
        if self._since - since < max(self._interval_s, (self._since - self._began) / _SERIES_SHARE):
            return
        period = _difference(seconds, before)
        if not period:
            return
        self._series_since = (self._since, self._steps, seconds)
        line = [self._recent.time, self._step, self._steps - steps, _shorter(period)]
        assert self._series is not None
        with self._series.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self, *, last: bool = True) -> None:
        """Writes the sums a last time; later calls do nothing."""
        if self._fd is None:
            return
        if last:
            self._series_since = (float("-inf"), *self._series_since[1:])
            self.write()
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


def times_folder(run: Path, start: int) -> Path:
    """The folder of one start."""
    return run / FOLDER / f"start-{start}"


def read_times(run: Path, start: int) -> list[RankTimes]:
    """What each rank of a start has written, by rank; torn records are left out."""
    found: list[RankTimes] = []
    folder = times_folder(run, start)
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []  # there is none; or this user may read the rest of the run, and not this
    for name in names:
        if match := _NAME.fullmatch(name):
            data = (folder / name).read_bytes()
            records = (data[at : at + RECORD_BYTES] for at in range(0, len(data), RECORD_BYTES))
            found.extend(one for record in records if (one := _parse(record, int(match[1]), start)) is not None)
    return sorted(found, key=lambda one: one.rank)


def read_series(run: Path, start: int) -> list[Period]:
    """The periods of rank 0 in a start, oldest first; a torn line is left out."""
    try:
        lines = (times_folder(run, start) / "series.jsonl").read_bytes().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            at, step, steps, seconds = json.loads(line)
            found.append(Period(float(at), int(step), int(steps), dict(seconds)))
        except (ValueError, TypeError):
            continue  # written by a process that died in it
    return found


def _difference(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Seconds since then; a start's first step takes over what was booked into parts, which is no step's any more."""
    if FIRST_STEP in now and FIRST_STEP not in before:
        before = {part: value for part, value in before.items() if part not in STEP_PARTS} | {
            FIRST_STEP: sum(value for part, value in before.items() if part in STEP_PARTS)
        }
    return {part: value - before.get(part, 0.0) for part, value in now.items() if value > before.get(part, 0.0)}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _shorter(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in values.items() if value}


def _record(content: dict[str, Any]) -> bytes:
    room = RECORD_BYTES - _CHECK_BYTES
    body = json.dumps(content, separators=(",", ":")).encode()
    if len(body) > room:  # a loop with many phases of its own, of long names
        body = json.dumps({**content, "recent": [0, {}]}, separators=(",", ":")).encode()
    body = body.ljust(room)
    return body + b" %08x\n" % zlib.crc32(body)


def _parse(record: bytes, node: int, start: int) -> RankTimes | None:
    body, check = record[:-_CHECK_BYTES], record[-_CHECK_BYTES:]
    if len(record) != RECORD_BYTES or check != b" %08x\n" % zlib.crc32(body):
        return None
    return _times(json.loads(body), node, start)


def _times(one: Mapping[str, Any], node: int, start: int) -> RankTimes:
    steps, seconds = one["recent"]
    return RankTimes(
        rank=one["rank"],
        node=node,
        host=one["host"],
        start=start,
        time=one["time"],
        step=one["step"],
        steps=one["steps"],
        seconds=one["s"],
        mean_s=one["mean"],
        sd_s=one["sd"] or 0.0,
        max_s=one["max"] or 0.0,
        recent=Period(one["time"], one["step"], steps, seconds),
        facts=one["facts"],
    )
