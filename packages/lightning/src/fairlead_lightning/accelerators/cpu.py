"""The accelerator `cpu`: the machine's processor."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Literal

from fairlead import AcceleratorConfigBase, hookimpl
from fairlead.findings import Inexact
from fairlead.interfaces import Devices
from fairlead.resolution import Resolution
from fairlead_lightning.accelerators import LightningAccelerator


class CPUAcceleratorConfig(AcceleratorConfigBase):
    """Compute on the processor; any number of ranks can share it."""

    name: Literal["cpu"] = "cpu"


class CPU(LightningAccelerator):
    """The processor: on every machine, and the last choice of `accelerator: auto`."""

    config = CPUAcceleratorConfig
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
