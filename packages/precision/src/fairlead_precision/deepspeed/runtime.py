"""Builds the precision of the strategy `deepspeed`."""

from __future__ import annotations

from typing import Any

from fairlead.interfaces import BuildContext
from fairlead_precision.deepspeed.config import DeepSpeedPrecisionConfig
from fairlead_precision.select import own_plugin

__all__ = ["build"]


def build(config: DeepSpeedPrecisionConfig, context: BuildContext) -> Any:
    """Lightning's plugin for the mode."""
    return own_plugin("deepspeed", config.precision, context)
