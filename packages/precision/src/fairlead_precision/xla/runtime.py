"""Builds the precision of the strategy `xla`."""

from __future__ import annotations

from typing import Any

from fairlead.interfaces import BuildContext
from fairlead_precision.select import own_plugin
from fairlead_precision.xla.config import XLAPrecisionConfig

__all__ = ["build"]


def build(config: XLAPrecisionConfig, context: BuildContext) -> Any:
    """Lightning's plugin for the mode."""
    return own_plugin("xla", config.precision, context)
