"""The config of `accelerator: cpu`."""

from __future__ import annotations

from typing import Literal

from fairlead import AcceleratorConfigBase

__all__ = ["CPUAcceleratorConfig"]


class CPUAcceleratorConfig(AcceleratorConfigBase):
    """Compute on the processor; any number of ranks can share it (R39, R40).

    Example:
        >>> CPUAcceleratorConfig().name
        'cpu'
    """

    name: Literal["cpu"] = "cpu"
