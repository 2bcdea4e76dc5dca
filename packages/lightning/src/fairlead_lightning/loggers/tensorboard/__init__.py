"""The logger `tensorboard`: event files in the run directory."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fairlead import LoggerConfigBase, LoggerPlugin
from fairlead.engines import LIGHTNING

__all__ = ["TensorBoard", "TensorBoardLoggerConfig", "tensorboard"]


class TensorBoardLoggerConfig(LoggerConfigBase):
    """Event files in `tensorboard/` of the run directory: `tensorboard --logdir runs` shows all runs.

    A resumed start continues in the same folder and takes out what was logged after its checkpoint,
    so that each point is there once; what is logged once more with the same value of the epoch or the same
    hyperparameters is written once too.

    Example:
        >>> TensorBoardLoggerConfig(log_graph=True).log_graph
        True
    """

    name: Literal["tensorboard"] = "tensorboard"
    log_graph: bool = False
    """Also record the graph of the model; it needs `example_input_array` in the model."""
    default_hp_metric: bool = False
    """Record the placeholder `hp_metric` with the hyperparameters, as Lightning does by default; it would show as a
    metric of value -1."""
    prefix: str = ""
    """Put before the name of each metric, with a dash."""
    flush_secs: int = Field(120, gt=0)
    """Seconds after which what was logged is written to disk at the latest. TensorBoard's default."""


class TensorBoard(LoggerPlugin):
    """Metrics for TensorBoard."""

    config = TensorBoardLoggerConfig
    runtime = "fairlead_lightning.loggers.tensorboard.runtime:build"
    engines = (*LIGHTNING, "tensorboard")
    extra = "tensorboard"


tensorboard = TensorBoard()
