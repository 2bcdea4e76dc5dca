"""What a stop from outside means for W&B: its run is shown as preempted, and its process may have ended before ours."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from lightning.pytorch.loggers import WandbLogger


def mark_preempting(loggers: Iterable[object]) -> None:
    """Marks the runs of these loggers that are open, ours or a script's own."""
    for logger in loggers:
        if not isinstance(logger, WandbLogger) or getattr(logger, "gone", False):
            continue
        run: Any = logger._experiment
        if not hasattr(run, "mark_preempting"):  # none is open, or W&B is disabled
            continue
        if answers(run):
            run.mark_preempting()
        else:
            vars(logger)["gone"] = True
            forget_service()


def answers(run: Any) -> bool:
    """Whether W&B's process is there: it ends at once of a SIGTERM, which a scheduler sends to all of a job."""
    try:
        run.summary.update({})
    except Exception:  # a broken connection; of which class depends on the version
        return False
    return True


def forget_service() -> None:
    """Says that W&B's process has ended, which W&B would otherwise find out at the exit, with a traceback."""
    import wandb

    why = ""
    try:
        wandb.teardown()
    except Exception as error:
        why = f" ({error})"
    print(f"W&B's process has ended before this one, as of a signal to the whole job{why}", file=sys.stderr, flush=True)
