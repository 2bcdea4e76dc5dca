"""What `cuda` and its second name `gpu` contribute."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path

from fairlead import AcceleratorPlugin, hookimpl
from fairlead.interfaces import Devices
from fairlead_lightning.accelerators.cuda.amd import amd_devices
from fairlead_lightning.accelerators.cuda.config import CUDAAcceleratorConfig
from fairlead_lightning.accelerators.cuda.nvidia import nvidia_devices
from fairlead_lightning.fields import LIGHTNING

__all__ = ["CUDA", "cuda", "find_devices", "gpu"]


class CUDA(AcceleratorPlugin):
    """GPUs of NVIDIA, and of AMD under ROCm; the first choice of `accelerator: auto` (R38, R39)."""

    config = CUDAAcceleratorConfig
    runtime = "fairlead_lightning.accelerators.cuda.runtime:build"
    engines = LIGHTNING
    extra = "lightning"
    priority = 100
    backend = "nccl"

    @hookimpl
    def fairlead_devices(self, environ: Mapping[str, str]) -> Devices:
        """GPUs that the kernel shows, the environment leaves visible, and the installed torch can drive (R41, R42)."""
        return find_devices(environ, Path("/"), torch=_torch_version())


def find_devices(environ: Mapping[str, str], root: Path, *, torch: str | None) -> Devices:
    """The GPUs that this process may use.

    Args:
        environ: The environment variables.
        root: The root of the file system.
        torch: The version of the installed torch; None: it is not installed, or not known.
    """
    nvidia = nvidia_devices(environ, root)
    found = nvidia
    if not nvidia.count:
        amd = amd_devices(environ, root)
        evidence = f"{nvidia.evidence}, {amd.evidence}" if not amd.count else amd.evidence
        found = Devices(amd.count, evidence, amd.names)
    if found.count and torch is not None and torch.endswith("+cpu"):
        return Devices(0, f"{found.count} by {found.evidence}; but torch {torch} was built without CUDA")
    return found


def _torch_version() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


cuda = CUDA()
gpu = CUDA(name="cuda")
