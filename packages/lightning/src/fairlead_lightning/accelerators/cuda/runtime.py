"""Builds Lightning's CUDA accelerator."""

from __future__ import annotations

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.accelerators import CUDAAccelerator as FabricCUDA
from lightning.pytorch.accelerators import CUDAAccelerator

from fairlead.errors import ConfigError
from fairlead.interfaces import BuildContext
from fairlead_lightning.accelerators.cuda.config import CUDAAcceleratorConfig

__all__ = ["build"]


def build(config: CUDAAcceleratorConfig, context: BuildContext) -> Accelerator:
    """The accelerator of the engine's class family.

    Raises:
        ConfigError: The machine may have GPUs, but this torch cannot use them (R42).
    """
    if not CUDAAccelerator.is_available():
        built = torch.version.cuda or torch.version.hip
        raise ConfigError(
            f"torch {torch.__version__} finds no GPU it can use",
            where="trainer.accelerator",
            why=f"seen without torch: {context.resolution.devices_found.evidence}; "
            + (f"torch was built for CUDA or ROCm {built}" if built else "torch was built for the CPU only"),
            fix="the driver may be too old for this torch: see `nvidia-smi` for the CUDA version it serves"
            if built
            else "install a torch built for CUDA (pytorch.org/get-started), or choose `accelerator: cpu`",
        )
    return CUDAAccelerator() if context.engine == "trainer" else FabricCUDA()
