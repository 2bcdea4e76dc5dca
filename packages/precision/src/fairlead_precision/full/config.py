"""The config of `precision: 32-true`."""

from __future__ import annotations

from typing import Literal

from fairlead import PrecisionConfigBase

__all__ = ["FullPrecisionConfig"]


class FullPrecisionConfig(PrecisionConfigBase):
    """32-bit parameters and computation: the default (R44).

    Example:
        >>> FullPrecisionConfig().name
        '32-true'
    """

    name: Literal["32-true"] = "32-true"
