"""What the logger `wandb` contributes."""

from __future__ import annotations

from fairlead import LoggerPlugin
from fairlead_lightning.fields import LIGHTNING
from fairlead_lightning.loggers.wandb.config import WandbLoggerConfig

__all__ = ["Wandb", "wandb"]


class Wandb(LoggerPlugin):
    """Metrics at Weights & Biases."""

    config = WandbLoggerConfig
    runtime = "fairlead_lightning.loggers.wandb.runtime:build"
    engines = (*LIGHTNING, "wandb>=0.19")
    extra = "wandb"


wandb = Wandb()
