"""Every use of a private part of Lightning, each with a contract test that fails when Lightning changes it.

Lightning offers no public way to do these things; nothing else in Fairlead touches its private names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as L

__all__ = [
    "between_epochs",
    "inside_epoch",
    "replace_sigterm_handler",
    "resume_from",
    "set_root_dir",
    "stop_on_sigterm",
]


def set_root_dir(trainer: L.Trainer, path: Path) -> None:
    """Moves `trainer.default_root_dir`, which has no setter: the run directory is known only when fit begins."""
    private: Any = trainer
    private._default_root_dir = str(path)


def resume_from(trainer: L.Trainer, path: Path) -> None:
    """Makes the fit that is under way restore from a checkpoint, called from a callback's `setup`.

    Lightning passes `ckpt_path` down before any hook runs, and reads it after `setup`, once, in
    `resume_start`; there it is replaced.
    """
    connector: Any = trainer._checkpoint_connector
    original = connector.resume_start

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        connector.resume_start = original
        original(str(path), weights_only=weights_only)

    connector.resume_start = resume_start


def between_epochs(checkpoint: dict[str, Any]) -> None:
    """Makes the epoch in a checkpoint one that is over, and the next one has not begun."""
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]
    for progress in (epochs["total"], epochs["current"]):
        progress |= dict.fromkeys(progress, progress["completed"])


def inside_epoch(checkpoint: dict[str, Any]) -> None:
    """Makes the epoch in a checkpoint one that has begun: Lightning counts one that a limit cut short as done."""
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]
    for progress in (epochs["total"], epochs["current"]):
        progress["processed"] = progress["completed"] = progress["ready"] - 1


def begin_next_epoch(trainer: L.Trainer) -> None:
    """Called from `on_train_start` of a fit that was restored from between two epochs: begins the next one.

    With `max_steps` Lightning takes the epoch that is over for one to be finished: it runs an empty
    epoch, counts it, and steps the schedules once more.
    """
    loop: Any = trainer.fit_loop
    epochs = loop.epoch_progress.current
    if len({epochs.ready, epochs.started, epochs.processed, epochs.completed}) == 1:
        loop._restarting = False  # the setter of `restarting` would make it True again
        loop.epoch_loop.restarting = False
        loop.epoch_loop.reset_restart_stage()


def replace_sigterm_handler(trainer: L.Trainer, note: Callable[[int, FrameType | None], None]) -> None:
    """Has `note` called on SIGTERM instead of Lightning's handler, which starts a collective wherever the rank is.

    Lightning's broadcast before every batch, by which rank 0 tells the others, goes with it.
    """
    connector: Any = trainer._signal_connector
    connector._sigterm_notifier_fn = note
    loop: Any = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = _nothing


def stop_on_sigterm(trainer: L.Trainer) -> None:
    """Makes Lightning's loops raise SIGTERMException at their next boundary."""
    trainer._signal_connector.received_sigterm = True


def _nothing() -> None:
    pass
