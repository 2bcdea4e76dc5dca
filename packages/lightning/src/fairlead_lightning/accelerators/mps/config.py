"""The config of `accelerator: mps`."""

from __future__ import annotations

from typing import Literal

from fairlead import AcceleratorConfigBase

__all__ = ["MPSAcceleratorConfig"]


class MPSAcceleratorConfig(AcceleratorConfigBase):
    """Compute on the GPU of an Apple computer, through Metal Performance Shaders; one rank (R39, R40).

    Example:
        >>> MPSAcceleratorConfig().name
        'mps'
    """

    name: Literal["mps"] = "mps"
