"""The config of `strategy: single_device`."""

from __future__ import annotations

from typing import Literal

from fairlead import StrategyConfigBase

__all__ = ["SingleDeviceStrategyConfig"]


class SingleDeviceStrategyConfig(StrategyConfigBase):
    """One device, one process, no process group (R13).

    Example:
        >>> SingleDeviceStrategyConfig().model_dump()
        {'name': 'single_device'}
    """

    name: Literal["single_device"] = "single_device"
