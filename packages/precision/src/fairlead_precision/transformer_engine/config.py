"""The config of `precision: transformer-engine` and its preset."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fairlead import PrecisionConfigBase
from fairlead.bases import ConfigModel
from fairlead_precision.fields import Half

__all__ = ["FP8Recipe", "TransformerEnginePrecisionConfig"]


class FP8Recipe(ConfigModel):
    """How 8-bit values are scaled: Transformer Engine's `DelayedScaling`, with its defaults."""

    margin: int = 0
    """Powers of two kept free above the largest value seen."""
    fp8_format: Literal["HYBRID", "E4M3"] = "HYBRID"
    """`HYBRID`: E4M3 forward, E5M2 for gradients, which need more range."""
    amax_history_len: int = Field(1024, gt=0)
    """Steps whose largest values are remembered."""
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Scale by the largest value remembered, or the last."""


class TransformerEnginePrecisionConfig(PrecisionConfigBase):
    """8-bit floating point in linear layers, by NVIDIA's Transformer Engine; H100-class GPUs (R44, R45, R47).

    Example:
        >>> TransformerEnginePrecisionConfig(replace_layers=True).weights_dtype
        'bfloat16'
    """

    name: Literal["transformer-engine"] = "transformer-engine"
    weights_dtype: Half = "bfloat16"
    """Format of the weights."""
    replace_layers: bool | None = None
    """Replace `Linear` and `LayerNorm` by Transformer Engine's; None does, unless the model has some of them; False:
    the model is built of them."""
    recipe: FP8Recipe | None = None
    """How values are scaled; None is Transformer Engine's default."""
    fallback_compute_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """What operations without 8-bit support compute in; None: `weights_dtype`."""
