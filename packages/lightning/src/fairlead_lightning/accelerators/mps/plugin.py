"""What `mps` contributes."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping

from fairlead import AcceleratorPlugin, hookimpl
from fairlead.interfaces import Devices
from fairlead_lightning.accelerators.mps.config import MPSAcceleratorConfig
from fairlead_lightning.fields import LIGHTNING

__all__ = ["MPS", "find_devices", "mps"]


class MPS(AcceleratorPlugin):
    """The GPU of an Apple computer (R38, R39)."""

    config = MPSAcceleratorConfig
    runtime = "fairlead_lightning.accelerators.mps.runtime:build"
    engines = LIGHTNING
    extra = "lightning"
    priority = 80

    @hookimpl
    def fairlead_devices(self, environ: Mapping[str, str]) -> Devices:
        """One device on macOS with an Apple processor."""
        return find_devices(sys.platform, platform.machine())


def find_devices(system: str, machine: str) -> Devices:
    """One device where the system is macOS and the processor Apple's own.

    Example:
        >>> find_devices("darwin", "arm64").count, find_devices("linux", "aarch64").count
        (1, 0)
    """
    return Devices(int(system == "darwin" and machine == "arm64"), f"{system} on {machine}")


mps = MPS()
