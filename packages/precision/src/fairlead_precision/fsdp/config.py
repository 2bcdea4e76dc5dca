"""The config of `precision: fsdp`."""

from __future__ import annotations

from typing import Literal

from fairlead import PrecisionConfigBase
from fairlead_precision.fields import Mode

__all__ = ["FSDPPrecisionConfig"]


class FSDPPrecisionConfig(PrecisionConfigBase):
    """The precision of the strategy `fsdp`, named outright (R45).

    Example:
        >>> FSDPPrecisionConfig().precision
        '32-true'
    """

    name: Literal["fsdp"] = "fsdp"
    precision: Mode = "32-true"
    """The mode, under Lightning's name. The general names (`precision: bf16-true`) choose it as well."""
