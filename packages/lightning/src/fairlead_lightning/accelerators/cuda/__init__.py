"""The accelerator `cuda` and its second name `gpu`: GPUs of NVIDIA, and of AMD, which torch drives as `cuda`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from fairlead import AcceleratorConfigBase, hookimpl
from fairlead.errors import ConfigError
from fairlead.exactness import inexact_kernels
from fairlead.findings import Inexact
from fairlead.interfaces import BuildContext, Devices
from fairlead.resolution import Resolution
from fairlead_lightning.accelerators import LightningAccelerator
from fairlead_lightning.accelerators import build as build_by_name
from fairlead_lightning.accelerators.cuda.amd import amd_devices
from fairlead_lightning.accelerators.cuda.nvidia import nvidia_devices

__all__ = ["CUDA", "CUDAAcceleratorConfig", "build", "cuda", "find_devices", "gpu"]


class CUDAAcceleratorConfig(AcceleratorConfigBase):
    """Compute on GPUs of NVIDIA, or of AMD with a ROCm build of torch; one rank each."""

    name: Literal["cuda"] = "cuda"


class CUDA(LightningAccelerator):
    """GPUs of NVIDIA, and of AMD under ROCm; the first choice of `accelerator: auto`."""

    config = CUDAAcceleratorConfig
    runtime = "fairlead_lightning.accelerators.cuda:build"
    priority = 100
    backend = "nccl"

    @hookimpl
    def fairlead_devices(self, environ: Mapping[str, str]) -> Devices:
        """GPUs that the kernel shows, the environment leaves visible, and the installed torch can drive."""
        return find_devices(environ, Path("/"), torch=_torch_version())

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterator[Inexact]:
        """Exact with deterministic kernels, which are chosen in the same way at each start."""
        config = resolution.trainer
        return inexact_kernels(config.deterministic, config.benchmark, _in_a_job)


cuda = CUDA()
gpu = CUDA(name="cuda")


def build(config: CUDAAcceleratorConfig, context: BuildContext) -> Any:
    """Lightning's accelerator, or a `ConfigError` where the machine may have GPUs that this torch cannot use."""
    import torch
    from lightning.pytorch.accelerators import CUDAAccelerator

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
    return build_by_name(config, context)


def _in_a_job(name: str, value: object) -> str:
    return f"trainer.{name}: {'null' if value is None else str(value).lower()}"


def find_devices(environ: Mapping[str, str], root: Path, *, torch: str | None) -> Devices:
    """The GPUs that this process may use; `torch` is the installed version, None where it is not known."""
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
