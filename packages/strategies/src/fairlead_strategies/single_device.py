"""One device, one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from fairlead import BuildContext, Capability, Resolution, StrategyConfigBase, hookimpl
from fairlead.findings import Inexact
from fairlead_strategies.shared import LightningStrategy


class SingleDeviceStrategyConfig(StrategyConfigBase):
    """One device, one process, no process group."""

    name: Literal["single_device"] = "single_device"


class SingleDevice(LightningStrategy):
    """Trains on one device without distribution."""

    config = SingleDeviceStrategyConfig
    runtime = "fairlead_strategies.single_device:build"
    one_rank = True

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """XLA devices need another strategy."""
        reason = "Lightning drives an XLA device only through its XLA strategies, also when there is one"
        yield self.no(("accelerator.xla",), reason, "strategy: xla")

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """One process adds in one order, and the checkpoint holds its state as it is."""
        return ()


def build(config: SingleDeviceStrategyConfig, context: BuildContext) -> Any:
    """Lightning's strategy for the first chosen device of the resolved accelerator."""
    import torch
    from lightning.fabric.strategies import SingleDeviceStrategy as FabricSingleDeviceStrategy
    from lightning.pytorch.strategies import SingleDeviceStrategy

    kind, indices = context.resolution.device_type, context.resolution.device_indices
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, indices[0] if indices else 0)
    return SingleDeviceStrategy(device) if context.engine == "trainer" else FabricSingleDeviceStrategy(device)


single_device = SingleDevice()
