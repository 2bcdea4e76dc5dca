"""Tells W&B that a run is stopped from outside, and may go on: it shows it as preempted, not as failed."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch.loggers import WandbLogger


def mark_preempting(loggers: Iterable[object]) -> None:
    """Marks the runs of these loggers that are open, ours or a script's own."""
    for logger in loggers:
        run = logger._experiment if isinstance(logger, WandbLogger) else None
        mark = getattr(run, "mark_preempting", None)
        if mark is not None:
            mark()
