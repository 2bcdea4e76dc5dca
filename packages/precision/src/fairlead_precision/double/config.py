"""The config of `precision: 64-true`."""

from __future__ import annotations

from typing import Literal

from fairlead import PrecisionConfigBase

__all__ = ["DoublePrecisionConfig"]


class DoublePrecisionConfig(PrecisionConfigBase):
    """64-bit parameters and gradients: slow, for telling rounding from a mistake (R50).

    Example:
        >>> DoublePrecisionConfig().name
        '64-true'
    """

    name: Literal["64-true"] = "64-true"
