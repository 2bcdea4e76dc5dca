"""Builds the precision of the strategy `fsdp`."""

from __future__ import annotations

from typing import Any

from fairlead.interfaces import BuildContext
from fairlead_precision.fsdp.config import FSDPPrecisionConfig
from fairlead_precision.select import own_plugin

__all__ = ["build"]


def build(config: FSDPPrecisionConfig, context: BuildContext) -> Any:
    """Lightning's plugin for the mode."""
    return own_plugin("fsdp", config.precision, context)
