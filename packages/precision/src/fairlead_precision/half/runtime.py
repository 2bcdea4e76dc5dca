"""Builds 16-bit precision."""

from __future__ import annotations

from typing import Any

from fairlead.interfaces import BuildContext
from fairlead_precision.half.config import HalfPrecisionConfig
from fairlead_precision.select import precision_plugin

__all__ = ["build"]


def build(config: HalfPrecisionConfig, context: BuildContext) -> Any:
    """Lightning's precision plugin for the resolved strategy."""
    return precision_plugin("16-true" if config.dtype == "float16" else "bf16-true", context)
