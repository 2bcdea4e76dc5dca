"""Builds Lightning's XLA strategies: the single-device one for one rank, else the parallel one."""

from __future__ import annotations

from lightning.fabric.strategies import SingleDeviceXLAStrategy as FabricSingleDeviceXLAStrategy
from lightning.fabric.strategies import XLAStrategy as FabricXLAStrategy
from lightning.pytorch.strategies import SingleDeviceXLAStrategy, XLAStrategy

from fairlead.interfaces import BuildContext
from fairlead_strategies.xla.config import XLAStrategyConfig

__all__ = ["build"]


def build(
    config: XLAStrategyConfig, context: BuildContext
) -> XLAStrategy | SingleDeviceXLAStrategy | FabricXLAStrategy | FabricSingleDeviceXLAStrategy:
    """The strategy for the resolved number of ranks.

    The parallel ones bring their own cluster environment, Lightning's `XLAEnvironment`.

    Raises:
        ModuleNotFoundError: torch-xla is not installed.
    """
    if context.resolution.world_size == 1:
        indices = context.resolution.device_indices
        index = indices[0] if indices else 0
        if context.engine == "trainer":
            return SingleDeviceXLAStrategy(index, debug=config.debug)
        return FabricSingleDeviceXLAStrategy(index)
    if context.engine == "trainer":
        return XLAStrategy(debug=config.debug, sync_module_states=config.sync_module_states)
    return FabricXLAStrategy(sync_module_states=config.sync_module_states)
