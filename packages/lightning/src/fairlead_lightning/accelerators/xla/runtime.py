"""Builds Lightning's XLA accelerator."""

from __future__ import annotations

from lightning.fabric.accelerators import Accelerator
from lightning.fabric.accelerators import XLAAccelerator as FabricXLA
from lightning.pytorch.accelerators import XLAAccelerator

from fairlead.interfaces import BuildContext
from fairlead_lightning.accelerators.xla.config import XLAAcceleratorConfig

__all__ = ["build"]


def build(config: XLAAcceleratorConfig, context: BuildContext) -> Accelerator:
    """The accelerator of the engine's class family."""
    return XLAAccelerator() if context.engine == "trainer" else FabricXLA()
