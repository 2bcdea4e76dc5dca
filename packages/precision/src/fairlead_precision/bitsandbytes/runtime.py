"""Builds Lightning's bitsandbytes precision."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.plugins.precision import BitsandbytesPrecision as FabricBitsandbytesPrecision
from lightning.pytorch.plugins.precision import BitsandbytesPrecision

from fairlead.interfaces import BuildContext
from fairlead_precision.bitsandbytes.config import BitsandbytesPrecisionConfig

__all__ = ["build"]


def build(config: BitsandbytesPrecisionConfig, context: BuildContext) -> Any:
    """The plugin; bitsandbytes is imported here."""
    kind = BitsandbytesPrecision if context.engine == "trainer" else FabricBitsandbytesPrecision
    dtype = getattr(torch, config.dtype) if config.dtype else None
    return kind(mode=config.mode, dtype=dtype, ignore_modules=set(config.ignore_modules))
