"""The curves of a run: what is in `metrics.csv`, of any length, as a few hundred points."""

from __future__ import annotations

import bisect
import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MOST_POINTS: Final = 60_000
"""Of all curves of a page together: it stays small enough to be sent by mail."""
_MOST: Final = 1200
_NOT_METRICS: Final = ("step", "epoch")


@dataclass(frozen=True)
class Point:
    """The values of a metric in some neighbouring steps; `step` is the last of them."""

    step: int
    mean: float
    low: float
    high: float


class Curve:
    """The points of one metric: when there are too many, neighbours are merged.

    Attributes:
        not_finite: How many values were infinite or not a number; they are no points.
    """

    def __init__(self, most: int) -> None:
        self.not_finite = 0
        self._most = 2 * max(1, most)
        self._each = 1
        self._open = 0
        self._steps: list[int] = []
        self._sums: list[float] = []
        self._counts: list[int] = []
        self._lows: list[float] = []
        self._highs: list[float] = []

    def add(self, step: int, value: float) -> None:
        """Adds the value of a step, in the order of the steps."""
        if not math.isfinite(value):
            self.not_finite += 1
            return
        if self._open and self._open < self._each:
            self._steps[-1] = step
            self._sums[-1] += value
            self._counts[-1] += 1
            self._lows[-1] = min(self._lows[-1], value)
            self._highs[-1] = max(self._highs[-1], value)
            self._open += 1
            return
        if len(self._steps) == self._most:
            self._merge()
        self._steps.append(step)
        self._sums.append(value)
        self._counts.append(1)
        self._lows.append(value)
        self._highs.append(value)
        self._open = 1

    def _merge(self) -> None:
        self._each *= 2
        self._steps = self._steps[1::2]
        for name, together in (("_sums", sum), ("_counts", sum), ("_lows", min), ("_highs", max)):
            values = getattr(self, name)
            setattr(self, name, [together(pair) for pair in zip(values[::2], values[1::2], strict=True)])

    @property
    def points(self) -> list[Point]:
        """The points, by step."""
        columns = zip(self._steps, self._sums, self._counts, self._lows, self._highs, strict=True)
        return [Point(step, total / count, low, high) for step, total, count, low, high in columns]


def read_curves(file: Path, runs: int = 1) -> dict[str, Curve]:
    """The curves in a `metrics.csv`, by metric; a file that is not there has none.

    Args:
        file: A row for each step, its columns are `step`, `epoch` and the metrics; torn rows are left out.
        runs: How many runs share the page.
    """
    try:
        lines = file.open(encoding="utf-8", errors="replace", newline="")
    except FileNotFoundError:
        return {}
    with lines:
        rows = csv.reader(lines)
        columns = next(rows, [])
        if not columns or columns[0] != "step":
            return {}
        names = [name for name in columns if name not in _NOT_METRICS]
        most = min(_MOST, MOST_POINTS // max(1, 2 * len(names) * runs))
        curves = [None if name in _NOT_METRICS else Curve(most) for name in columns]
        for row in rows:
            if len(row) != len(columns) or not row[0].isdecimal():
                continue
            step = int(row[0])
            for curve, cell in zip(curves, row, strict=True):
                if cell and curve is not None:
                    try:
                        curve.add(step, float(cell))
                    except ValueError:  # a text that somebody logged
                        continue
    found = zip(columns, curves, strict=True)
    return {name: curve for name, curve in found if curve is not None and (curve.points or curve.not_finite)}


class Clock:
    """When each step was done, between the moments at which it is known.

    Args:
        known: Pairs of a step and a time in seconds since the epoch. Of a step that was done twice, as after a failure,
            the last time counts.
    """

    def __init__(self, known: Iterable[tuple[int, float]]) -> None:
        self._steps: list[int] = []
        self._times: list[float] = []
        for step, when in sorted(known, key=lambda pair: pair[1]):
            while self._steps and self._steps[-1] >= step:
                self._steps.pop()
                self._times.pop()
            self._steps.append(step)
            self._times.append(when)

    def when(self, step: int) -> float | None:
        """The time of a step; None where nothing is known around it."""
        after = bisect.bisect_left(self._steps, step)
        if after == len(self._steps):
            return self._times[-1] if self._steps else None
        if self._steps[after] == step or after == 0:
            return self._times[after]
        before = after - 1
        share = (step - self._steps[before]) / (self._steps[after] - self._steps[before])
        return self._times[before] + share * (self._times[after] - self._times[before])
