"""Numeric precisions, as Fairlead plugins: the configs. No torch is imported here."""

from __future__ import annotations

from fairlead_precision.bitsandbytes.config import BitsandbytesPrecisionConfig
from fairlead_precision.deepspeed.config import DeepSpeedPrecisionConfig
from fairlead_precision.double.config import DoublePrecisionConfig
from fairlead_precision.fsdp.config import FSDPPrecisionConfig
from fairlead_precision.full.config import FullPrecisionConfig
from fairlead_precision.half.config import HalfPrecisionConfig
from fairlead_precision.mixed.config import MixedPrecisionConfig
from fairlead_precision.transformer_engine.config import FP8Recipe, TransformerEnginePrecisionConfig
from fairlead_precision.xla.config import XLAPrecisionConfig

__all__ = [
    "BitsandbytesPrecisionConfig",
    "DeepSpeedPrecisionConfig",
    "DoublePrecisionConfig",
    "FP8Recipe",
    "FSDPPrecisionConfig",
    "FullPrecisionConfig",
    "HalfPrecisionConfig",
    "MixedPrecisionConfig",
    "TransformerEnginePrecisionConfig",
    "XLAPrecisionConfig",
]
