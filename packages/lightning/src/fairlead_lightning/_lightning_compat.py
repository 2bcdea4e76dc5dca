"""Every use of a private part of Lightning, each with a contract test that fails when Lightning changes it.

Lightning offers no public way to do these things; nothing else in Fairlead touches its private names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L

__all__ = ["resume_from", "set_root_dir"]


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
