"""Builds automatic mixed precision."""

from __future__ import annotations

from typing import Any

from fairlead.interfaces import BuildContext
from fairlead_precision.mixed.config import MixedPrecisionConfig
from fairlead_precision.select import precision_plugin

__all__ = ["build"]


def build(config: MixedPrecisionConfig, context: BuildContext) -> Any:
    """Lightning's precision plugin for the resolved strategy; float16 with the config's gradient scaler."""
    if config.dtype == "bfloat16":
        return precision_plugin("bf16-mixed", context)
    return precision_plugin("16-mixed", context, config.scaler())
