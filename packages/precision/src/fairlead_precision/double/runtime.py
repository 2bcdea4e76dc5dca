"""Builds 64-bit precision."""

from __future__ import annotations

from typing import Any

from fairlead.interfaces import BuildContext
from fairlead_precision.double.config import DoublePrecisionConfig
from fairlead_precision.select import precision_plugin

__all__ = ["build"]


def build(config: DoublePrecisionConfig, context: BuildContext) -> Any:
    """Lightning's precision plugin for the resolved strategy."""
    return precision_plugin(config.name, context)
