"""The config of `accelerator: cuda` and its second name `gpu`."""

from __future__ import annotations

from typing import Literal

from fairlead import AcceleratorConfigBase

__all__ = ["CUDAAcceleratorConfig"]


class CUDAAcceleratorConfig(AcceleratorConfigBase):
    """Compute on GPUs of NVIDIA, or of AMD with a ROCm build of torch; one rank each (R39, R40).

    Example:
        >>> CUDAAcceleratorConfig().name
        'cuda'
    """

    name: Literal["cuda"] = "cuda"
