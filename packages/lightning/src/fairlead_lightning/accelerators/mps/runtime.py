"""Builds Lightning's MPS accelerator."""

from __future__ import annotations

from lightning.fabric.accelerators import Accelerator
from lightning.fabric.accelerators import MPSAccelerator as FabricMPS
from lightning.pytorch.accelerators import MPSAccelerator

from fairlead.interfaces import BuildContext
from fairlead_lightning.accelerators.mps.config import MPSAcceleratorConfig

__all__ = ["build"]


def build(config: MPSAcceleratorConfig, context: BuildContext) -> Accelerator:
    """The accelerator of the engine's class family."""
    return MPSAccelerator() if context.engine == "trainer" else FabricMPS()
