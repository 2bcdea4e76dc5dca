"""The config of `strategy: xla`."""

from __future__ import annotations

from typing import Literal

from fairlead import StrategyConfigBase

__all__ = ["XLAStrategyConfig"]


class XLAStrategyConfig(StrategyConfigBase):
    """TPUs through torch-xla; one device or many.

    Example:
        >>> XLAStrategyConfig(debug=True).sync_module_states
        True
    """

    name: Literal["xla"] = "xla"
    debug: bool = False
    """Have torch-xla report compilations and slow operations (PT_XLA_DEBUG). The Trainer only."""
    sync_module_states: bool = True
    """Start every rank with the parameters of rank 0. Of no effect with one device."""
