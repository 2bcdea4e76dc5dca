"""The config of `precision: half` and its presets `16-true` and `bf16-true`."""

from __future__ import annotations

from typing import Literal

from fairlead import PrecisionConfigBase
from fairlead_precision.fields import Half

__all__ = ["HalfPrecisionConfig"]


class HalfPrecisionConfig(PrecisionConfigBase):
    """16-bit parameters and computation: half the memory, at the price of accuracy (R45).

    Example:
        >>> HalfPrecisionConfig(dtype="bfloat16").name
        'half'
    """

    name: Literal["half"] = "half"
    dtype: Half = "float16"
    """`float16` has more digits, `bfloat16` the range of 32-bit numbers: it neither overflows nor needs tuning."""
