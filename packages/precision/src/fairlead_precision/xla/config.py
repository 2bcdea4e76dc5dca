"""The config of `precision: xla`."""

from __future__ import annotations

from typing import Literal

from fairlead import PrecisionConfigBase

__all__ = ["XLAPrecisionConfig"]


class XLAPrecisionConfig(PrecisionConfigBase):
    """The precision of the strategy `xla`, named outright (R45).

    Example:
        >>> XLAPrecisionConfig().precision
        '32-true'
    """

    name: Literal["xla"] = "xla"
    precision: Literal["32-true", "16-true", "bf16-true"] = "32-true"
    """The mode, under Lightning's name. The general names (`precision: bf16-true`) choose it as well."""
