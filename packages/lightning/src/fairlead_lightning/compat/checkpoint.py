"""What Lightning writes into a checkpoint, and where it resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L


def set_root_dir(trainer: L.Trainer, path: Path) -> None:
    """Moves `trainer.default_root_dir`, which has no setter: the run directory is known only when fit begins."""
    private: Any = trainer
    private._default_root_dir = str(path)


def resume_from(trainer: L.Trainer, path: Path) -> None:
    """Has the fit that is under way restore from a checkpoint: `resume_start` reads its path after `setup`."""
    connector: Any = trainer._checkpoint_connector
    original = connector.resume_start

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        connector.resume_start = original
        original(str(path), weights_only=weights_only)

    connector.resume_start = resume_start


def dump_checkpoint(trainer: L.Trainer, weights_only: bool | None) -> dict[str, Any]:
    """What `trainer.save_checkpoint` would hand to the strategy; on all ranks together, since strategies talk in it."""
    connector: Any = trainer._checkpoint_connector
    dumped: dict[str, Any] = connector.dump_checkpoint(weights_only)
    return dumped


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
