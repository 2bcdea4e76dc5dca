"""How fast a training goes, counted without touching the device, and what a finished fit says of itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fairlead.errors import CheckpointError
from fairlead_runs.commit import Checkpoint, best, list_checkpoints
from fairlead_runs.describe import counted, shown_path

WINDOW_S: Final = 30.0


class Throughput:
    """Samples and steps over the time that was spent training, on the caller's clock; validation stops it."""

    def __init__(self, step: int, now: float) -> None:
        self.samples = 0
        self.batches = 0
        self.first_step = step
        self.began = now
        self._paused = 0.0
        self._pause_began: float | None = None
        self._marks: deque[tuple[float, int, int]] = deque()

    def add(self, samples: int) -> None:
        """Counts a batch."""
        self.samples += samples
        self.batches += 1

    def pause(self, now: float) -> None:
        """Validation begins."""
        self._pause_began = now

    def resume(self, now: float) -> None:
        """Validation is over."""
        if self._pause_began is not None:
            self._paused += now - self._pause_began
            self._pause_began = None

    def mark(self, step: int, now: float) -> tuple[float, float] | None:
        """Samples and steps a second over about the last 30 s; None until there are two marks."""
        spent = self.trained_s(now)
        self._marks.append((spent, self.samples, step))
        while len(self._marks) > 2 and spent - self._marks[1][0] > WINDOW_S:
            self._marks.popleft()
        since, samples, steps = self._marks[0]
        if spent <= since:
            return None
        return (self.samples - samples) / (spent - since), (step - steps) / (spent - since)

    def trained_s(self, now: float) -> float:
        """Seconds spent training."""
        until = now if self._pause_began is None else self._pause_began
        return until - self.began - self._paused

    def left_s(self, step: int, total: int, steps_per_s: float, now: float) -> float:
        """Seconds until `total`, with the share of time that validation has taken so far."""
        trained = self.trained_s(now)
        share = (now - self.began) / trained if trained > 0 else 1.0
        return max(total - step, 0) / steps_per_s * share


def duration(seconds: float) -> str:
    """A time as a person says it: `0.4s`, `1m40s`, `2h05m`, `2d07h`."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total // 60 % 60:02d}m"
    return f"{total // 86400}d{total // 3600 % 24:02d}h"


def short(count: int) -> str:
    """A large count in three digits: `850`, `33.4k`, `1.24M`, `7B`."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return str(count)


def number(value: float) -> str:
    """Four significant digits, or all digits before the point: `2.31`, `51234`, `1.234e-05`."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def summary_lines(step: int, epoch: int, speed: Throughput, replicas: int, now: float, run_dir: Path) -> list[str]:
    """The closing lines of a fit on `replicas` ranks that each read a part of the data."""
    steps, trained = step - speed.first_step, speed.trained_s(now)
    here = f" ({steps} of them in this start)" if steps and steps != step else ""
    took = duration(now - speed.began)
    lines = [f"done        {counted(step, 'step')}{here}, {counted(epoch, 'epoch')} in {took}"]
    if speed.batches and trained > 0:
        samples = speed.samples * replicas / trained
        lines.append(f"speed       {number(samples)} samples/s, {number(steps / trained)} steps/s while training")
    run_dir = Path(shown_path(run_dir, Path.cwd()))
    checkpoints = list_checkpoints(run_dir / "checkpoints")
    if checkpoints:
        lines += [*_best(checkpoints), f"checkpoint  {checkpoints[-1].path}"]
    return [*lines, f"run         {run_dir}"]


def _best(checkpoints: Sequence[Checkpoint]) -> list[str]:
    try:
        last = checkpoints[-1].metadata
        monitor, mode = last.get("monitor"), last.get("mode")
        ranked = best(checkpoints, monitor, "max" if mode == "max" else "min") if isinstance(monitor, str) else []
    except CheckpointError:
        return []  # `fairlead checkpoint verify` tells what is wrong with one; a finished run need not fail over it
    if not ranked:
        return []
    metrics = ranked[0].metadata["metrics"]
    return [f"best        {monitor} {number(metrics[monitor])} at step {ranked[0].step}: {ranked[0].path}"]
