"""Builds Lightning's CPU accelerator."""

from __future__ import annotations

from lightning.fabric.accelerators import Accelerator
from lightning.fabric.accelerators import CPUAccelerator as FabricCPU
from lightning.pytorch.accelerators import CPUAccelerator

from fairlead.interfaces import BuildContext
from fairlead_lightning.accelerators.cpu.config import CPUAcceleratorConfig

__all__ = ["build"]


def build(config: CPUAcceleratorConfig, context: BuildContext) -> Accelerator:
    """The accelerator of the engine's class family."""
    return CPUAccelerator() if context.engine == "trainer" else FabricCPU()
