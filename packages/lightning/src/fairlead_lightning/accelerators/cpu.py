"""The accelerator `cpu`: the machine's processor."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from fairlead import AcceleratorConfigBase, AcceleratorPlugin, hookimpl
from fairlead.findings import Inexact
from fairlead.interfaces import BuildContext, Devices
from fairlead.resolution import Resolution
from fairlead_lightning.fields import LIGHTNING

if TYPE_CHECKING:
    from lightning.fabric.accelerators import Accelerator

__all__ = ["CPU", "CPUAcceleratorConfig", "build", "cpu"]


class CPUAcceleratorConfig(AcceleratorConfigBase):
    """Compute on the processor; any number of ranks can share it.

    Example:
        >>> CPUAcceleratorConfig().name
        'cpu'
    """

    name: Literal["cpu"] = "cpu"


class CPU(AcceleratorPlugin):
    """The processor: on every machine, and the last choice of `accelerator: auto`."""

    config = CPUAcceleratorConfig
    runtime = "fairlead_lightning.accelerators.cpu:build"
    engines = LIGHTNING
    extra = "lightning"
    priority = 0

    @hookimpl
    def fairlead_devices(self, environ: Mapping[str, str]) -> Devices:
        """One device that any number of ranks can share."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return Devices(1, f"{cores} processor core{'s' if cores > 1 else ''}", unlimited=True)

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """A CPU adds in one order, with the same number of threads."""
        return ()


cpu = CPU()


def build(config: CPUAcceleratorConfig, context: BuildContext) -> Accelerator:
    """Lightning's accelerator, of the engine's class family."""
    from lightning.fabric.accelerators import CPUAccelerator as FabricCPU
    from lightning.pytorch.accelerators import CPUAccelerator

    return CPUAccelerator() if context.engine == "trainer" else FabricCPU()
