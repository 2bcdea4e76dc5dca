"""What `cpu` contributes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fairlead import AcceleratorPlugin, hookimpl
from fairlead.interfaces import Devices
from fairlead_lightning.accelerators.cpu.config import CPUAcceleratorConfig
from fairlead_lightning.fields import LIGHTNING

__all__ = ["CPU", "cpu"]


class CPU(AcceleratorPlugin):
    """The processor: on every machine, and the last choice of `accelerator: auto` (R38)."""

    config = CPUAcceleratorConfig
    runtime = "fairlead_lightning.accelerators.cpu.runtime:build"
    engines = LIGHTNING
    extra = "lightning"
    priority = 0

    @hookimpl
    def fairlead_devices(self, environ: Mapping[str, str]) -> Devices:
        """One device that any number of ranks can share."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return Devices(1, f"{cores} processor core{'s' if cores > 1 else ''}", unlimited=True)


cpu = CPU()
