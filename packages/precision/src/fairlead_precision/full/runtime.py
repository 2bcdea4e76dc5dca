"""Builds 32-bit precision."""

from __future__ import annotations

from typing import Any

from fairlead.interfaces import BuildContext
from fairlead_precision.full.config import FullPrecisionConfig
from fairlead_precision.select import precision_plugin

__all__ = ["build"]


def build(config: FullPrecisionConfig, context: BuildContext) -> Any:
    """Lightning's precision plugin for the resolved strategy."""
    return precision_plugin(config.name, context)
