"""Numeric precisions, as Fairlead plugins: the configs. No torch is imported here."""

from __future__ import annotations

from fairlead_precision.bitsandbytes import BitsandbytesPrecisionConfig
from fairlead_precision.deepspeed import DeepSpeedPrecisionConfig
from fairlead_precision.double import DoublePrecisionConfig
from fairlead_precision.fsdp import FSDPPrecisionConfig
from fairlead_precision.full import FullPrecisionConfig
from fairlead_precision.half import HalfPrecisionConfig
from fairlead_precision.hardware import is_bf16_supported_no_emulation
from fairlead_precision.mixed import MixedPrecisionConfig
from fairlead_precision.torchao import TorchAOFloat8PrecisionConfig
from fairlead_precision.transformer_engine import FP8Recipe, TransformerEnginePrecisionConfig
from fairlead_precision.xla import XLAPrecisionConfig

__all__ = [
    "BitsandbytesPrecisionConfig",
    "DeepSpeedPrecisionConfig",
    "DoublePrecisionConfig",
    "FP8Recipe",
    "FSDPPrecisionConfig",
    "FullPrecisionConfig",
    "HalfPrecisionConfig",
    "MixedPrecisionConfig",
    "TorchAOFloat8PrecisionConfig",
    "TransformerEnginePrecisionConfig",
    "XLAPrecisionConfig",
    "is_bf16_supported_no_emulation",
]
