"""What a finished fit says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fairlead.errors import CheckpointError
from fairlead_lightning.display.throughput import Throughput, duration, number
from fairlead_runs.commit import Checkpoint, best, list_checkpoints


def summary_lines(
    *, step: int, epoch: int, speed: Throughput, replicas: int, now: float, run_dir: Path, cwd: Path | None = None
) -> list[str]:
    """The closing lines of a fit.

    Args:
        step: Steps of the run so far.
        epoch: Complete epochs of the run so far.
        speed: What this start has counted, on one rank.
        replicas: Ranks that each read their own part of the data.
        now: The time, on the clock of `speed`.
        run_dir: The run directory.
        cwd: Paths below it are shown relative to it; None: the working directory.
    """
    steps, trained = speed.steps(step), speed.trained_s(now)
    lines = [f"done        {_count(step, 'step')}, {_count(epoch, 'epoch')}"]
    if steps and steps != step:
        lines[0] += f" ({steps} of them in this start)"
    lines[0] += f" in {duration(speed.elapsed_s(now))}"
    if speed.batches and trained > 0:
        samples = speed.samples * replicas / trained
        lines.append(f"speed       {number(samples)} samples/s, {number(steps / trained)} steps/s while training")
    run_dir = _shown(run_dir, cwd or Path.cwd())
    checkpoints = list_checkpoints(run_dir / "checkpoints")
    lines += [*_best(checkpoints), *_newest(checkpoints), f"run         {run_dir}"]
    return lines


def _newest(checkpoints: Sequence[Checkpoint]) -> list[str]:
    return [f"checkpoint  {checkpoints[-1].path}"] if checkpoints else []


def _best(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """The best value of the monitored metric among the checkpoints that are kept."""
    if not checkpoints:
        return []
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


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _shown(path: Path, cwd: Path) -> Path:
    return path.relative_to(cwd) if path.is_relative_to(cwd) else path
