"""What a finished fit says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fairlead.errors import CheckpointError
from fairlead_lightning.display.throughput import Throughput, duration, number
from fairlead_runs.commit import Checkpoint, best, list_checkpoints
from fairlead_runs.describe import counted, shown_path


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
