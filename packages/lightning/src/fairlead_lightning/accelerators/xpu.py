"""The accelerator `xpu`: GPUs of Intel, which Lightning has no accelerator for."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from fairlead import AcceleratorConfigBase, Capability, hookimpl
from fairlead.capabilities import InstalledPlugins
from fairlead.findings import Inexact
from fairlead.interfaces import Devices
from fairlead.resolution import Resolution
from fairlead_lightning.accelerators import LightningAccelerator
from fairlead_lightning.accelerators.cuda.visible import GPU, visible

INTEL = "0x8086"
"""Intel's vendor number on the PCI bus (pci-ids.ucw.cz)."""
# torch sees discrete GPUs by the driver xe, or i915 before it; a processor's own graphics has the PCI address 00:02.0.
_DRIVERS = ("xe", "i915")
_GRAPHICS_OF_A_PROCESSOR = "0000:00:02.0"
_OTHERWISE = ("single_device", "ddp", "xla")


class XPUAcceleratorConfig(AcceleratorConfigBase):
    """Compute on GPUs of Intel, with a torch built for XPU; one rank each. Only ever tested with a stand-in."""

    name: Literal["xpu"] = "xpu"


class XPU(LightningAccelerator):
    """GPUs of Intel."""

    config = XPUAcceleratorConfig
    runtime = "fairlead_lightning.accelerators.xpu_runtime:build"
    priority = 70
    devices = r"(intel )?(data center gpu )?max[ _-]?(1550|1100)|pvc|ponte ?vecchio|arc[ _-]?[ab]\d+"
    backend = "xccl"

    @hookimpl
    def fairlead_devices(self, environ: Mapping[str, str]) -> Devices:
        """GPUs that the kernel shows, ZE_AFFINITY_MASK leaves, and the installed torch can drive."""
        try:
            torch = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            torch = None
        return find_devices(environ, Path("/"), torch=torch)

    @hookimpl
    def fairlead_capabilities(self, plugins: InstalledPlugins) -> Iterable[Capability]:
        """Not tested on such hardware."""
        others = tuple(f"strategy.{tag}" for tag in plugins.distinct("strategy") if tag not in _OTHERWISE)
        reason = "torch drives Intel's GPUs over xccl, but no strategy for several was ever run on one here"
        yield Capability("accelerator.xpu", others, "partial", reason, "strategy: single_device, on one GPU")
        reason = "Lightning wraps the model for DDP inside of a CUDA stream, whatever the device is"
        yield Capability("accelerator.xpu", ("strategy.ddp",), "no", reason, "strategy: fsdp2, or single_device")
        reason = "the XLA strategy drives XLA devices only"
        yield Capability("accelerator.xpu", ("strategy.xla",), "no", reason, "strategy: auto")
        cuda_only = ("precision.transformer-engine", "precision.fp8-torchao")
        reason = "its 8-bit kernels are for GPUs of NVIDIA and AMD"
        yield Capability("accelerator.xpu", cuda_only, "no", reason, "precision: bf16-mixed")

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterator[Inexact]:
        """Not shown."""
        yield Inexact(
            "the accelerator 'xpu'",
            why="no test has resumed a run on Intel's GPUs",
            fix="accelerator: cpu or cuda, where it matters",
            certain=False,
        )


xpu = XPU()


def find_devices(environ: Mapping[str, str], root: Path, *, torch: str | None) -> Devices:
    """The GPUs of Intel that this process may use; `torch` is the installed version, None where it is not known.

    ZE_AFFINITY_MASK lists those that the driver shows (oneAPI Level Zero specification, "Environment Variables").
    """
    cards = [path for path in sorted((root / "sys/class/drm").glob("renderD*")) if _is_discrete(path / "device")]
    if not cards:
        return Devices(0, "no GPU of Intel in /sys/class/drm")
    gpus = [GPU(index) for index in range(len(cards))]
    mask = environ.get("ZE_AFFINITY_MASK") or None
    # An entry `0.1` is one tile of a device; torch counts it as the device.
    devices = mask and ",".join(dict.fromkeys(item.partition(".")[0].strip() for item in mask.split(",")))
    left = visible(devices, gpus)
    evidence = f"/sys/class/drm; ZE_AFFINITY_MASK={mask!r}" if mask else "/sys/class/drm"
    if torch is not None and not torch.endswith("+xpu"):
        return Devices(0, f"{len(left)} by {evidence}; but torch {torch} was built without XPU")
    return Devices(len(left), evidence)


def _is_discrete(device: Path) -> bool:
    try:
        vendor = (device / "vendor").read_text().strip()
    except OSError:
        return False  # another container's, or gone
    driver = (device / "driver").resolve().name
    return vendor == INTEL and driver in _DRIVERS and device.resolve().name != _GRAPHICS_OF_A_PROCESSOR
