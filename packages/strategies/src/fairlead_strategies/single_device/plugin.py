"""What `single_device` contributes."""

from __future__ import annotations

from collections.abc import Iterable

from fairlead import StrategyPlugin, hookimpl
from fairlead.capabilities import Capability
from fairlead.findings import Inexact
from fairlead.resolve import Resolution
from fairlead_strategies.fields import LIGHTNING
from fairlead_strategies.single_device.config import SingleDeviceStrategyConfig

__all__ = ["SingleDevice", "single_device"]


class SingleDevice(StrategyPlugin):
    """Trains on one device without distribution."""

    config = SingleDeviceStrategyConfig
    runtime = "fairlead_strategies.single_device.runtime:build"
    engines = LIGHTNING
    extra = "lightning"

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """XLA devices need a strategy of their own."""
        yield Capability(
            "strategy.single_device",
            ("accelerator.xla",),
            "no",
            "Lightning drives an XLA device only through its XLA strategies, also when there is one",
            "strategy: xla",
        )

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """One process adds in one order, and the checkpoint holds its state as it is."""
        return ()


single_device = SingleDevice()
