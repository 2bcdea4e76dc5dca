"""The accelerator `mps`: the GPU of an Apple computer."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping
from typing import Literal

from fairlead import AcceleratorConfigBase, hookimpl
from fairlead.findings import Inexact
from fairlead.interfaces import Devices
from fairlead.resolution import Resolution
from fairlead_lightning.accelerators import LightningAccelerator


class MPSAcceleratorConfig(AcceleratorConfigBase):
    """Compute on the GPU of an Apple computer, through Metal Performance Shaders; one rank."""

    name: Literal["mps"] = "mps"


class MPS(LightningAccelerator):
    """The GPU of an Apple computer."""

    config = MPSAcceleratorConfig
    priority = 80

    @hookimpl
    def fairlead_devices(self, environ: Mapping[str, str]) -> Devices:
        """One device on macOS with an Apple processor."""
        return find_devices(sys.platform, platform.machine())

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterator[Inexact]:
        """Not shown."""
        yield Inexact(
            "the accelerator 'mps'",
            why="no test has shown that Apple's GPU computes the same bits twice",
            fix="accelerator: cpu, where it matters",
            certain=False,
        )


mps = MPS()


def find_devices(system: str, machine: str) -> Devices:
    """One device where the system is macOS and the processor Apple's own."""
    return Devices(int(system == "darwin" and machine == "arm64"), f"{system} on {machine}")
