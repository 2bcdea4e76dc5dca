"""What the logger `tensorboard` contributes."""

from __future__ import annotations

from fairlead import LoggerPlugin
from fairlead_lightning.fields import LIGHTNING
from fairlead_lightning.loggers.tensorboard.config import TensorBoardLoggerConfig

__all__ = ["TensorBoard", "tensorboard"]


class TensorBoard(LoggerPlugin):
    """Metrics for TensorBoard."""

    config = TensorBoardLoggerConfig
    runtime = "fairlead_lightning.loggers.tensorboard.runtime:build"
    engines = (*LIGHTNING, "tensorboard>=2.18")
    extra = "tensorboard"


tensorboard = TensorBoard()
