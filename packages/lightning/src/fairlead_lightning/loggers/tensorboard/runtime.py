"""Builds Lightning's TensorBoard logger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger

from fairlead.interfaces import BuildContext
from fairlead_lightning.loggers.tensorboard.config import TensorBoardLoggerConfig

__all__ = ["build"]


def build(config: TensorBoardLoggerConfig, context: BuildContext) -> TensorBoardLogger:
    """The logger, in `tensorboard/` of the run directory.

    `resume_step` in the context's extras is the step that this start goes on from: TensorBoard
    hides the points after it, which an earlier start has left.
    """
    further: dict[str, Any] = {"flush_secs": config.flush_secs}
    resume_step = context.extras.get("resume_step")
    if isinstance(resume_step, int):
        further["purge_step"] = resume_step + 1
    return TensorBoardLogger(
        save_dir=(context.run_dir or Path()) / "tensorboard",
        name="",
        version="",  # no folder per start
        log_graph=config.log_graph,
        default_hp_metric=config.default_hp_metric,
        prefix=config.prefix,
        **further,
    )
