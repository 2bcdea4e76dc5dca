"""Builds Lightning's single-device strategy."""

from __future__ import annotations

import torch
from lightning.fabric.strategies import SingleDeviceStrategy as FabricSingleDeviceStrategy
from lightning.pytorch.strategies import SingleDeviceStrategy

from fairlead.interfaces import BuildContext
from fairlead_strategies.single_device.config import SingleDeviceStrategyConfig

__all__ = ["build"]


def build(
    config: SingleDeviceStrategyConfig, context: BuildContext
) -> SingleDeviceStrategy | FabricSingleDeviceStrategy:
    """The strategy for the first chosen device of the resolved accelerator."""
    device = _device(context)
    return SingleDeviceStrategy(device) if context.engine == "trainer" else FabricSingleDeviceStrategy(device)


def _device(context: BuildContext) -> torch.device:
    kind = context.resolution.accelerator.name
    if kind == "cpu":
        return torch.device("cpu")
    indices = context.resolution.device_indices
    return torch.device(kind, indices[0] if indices else 0)
