"""The config of `precision: deepspeed`."""

from __future__ import annotations

from typing import Literal

from fairlead import PrecisionConfigBase
from fairlead_precision.fields import Mode

__all__ = ["DeepSpeedPrecisionConfig"]


class DeepSpeedPrecisionConfig(PrecisionConfigBase):
    """The precision of the strategy `deepspeed`, named outright (R45).

    Example:
        >>> DeepSpeedPrecisionConfig().precision
        '32-true'
    """

    name: Literal["deepspeed"] = "deepspeed"
    precision: Mode = "32-true"
    """The mode, under Lightning's name. The general names (`precision: bf16-true`) choose it as well."""
