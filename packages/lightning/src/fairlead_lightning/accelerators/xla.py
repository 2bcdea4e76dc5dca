"""The accelerator `xla` and its second name `tpu`: TPUs, and what else PJRT drives."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from fairlead import AcceleratorConfigBase, hookimpl
from fairlead.engines import LIGHTNING
from fairlead.findings import Inexact
from fairlead.interfaces import Devices
from fairlead.resolution import Resolution
from fairlead_lightning.accelerators import LightningAccelerator

GOOGLE = "0x1ae0"
"""Google's vendor number on the PCI bus (pci-ids.ucw.cz)."""


class XLAAcceleratorConfig(AcceleratorConfigBase):
    """Compute on TPUs, or on what else PJRT drives, through PyTorch/XLA."""

    name: Literal["xla"] = "xla"


class XLA(LightningAccelerator):
    """TPUs, and what else PJRT drives."""

    config = XLAAcceleratorConfig
    runtime = "fairlead_lightning.accelerators.xla_runtime:build"
    engines = (*LIGHTNING, "torch-xla")
    extra = "xla"
    priority = 90
    devices = r"tpu.*|v([2-6][ep]?|7x|5lite(pod)?)(-\d+)?"  # Google's names, also of a slice; a `v100` is a GPU
    backend = "xla"
    strategies = ("xla", "xla")

    @hookimpl
    def fairlead_devices(self, environ: Mapping[str, str]) -> Devices:
        """TPU chips that the kernel shows, or what PJRT_DEVICE names."""
        return find_devices(environ, Path("/"), installed=importlib.util.find_spec("torch_xla") is not None)

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterator[Inexact]:
        """Shown for CPUs that PJRT drives."""
        kinds = sorted({name for name in resolution.devices_found.names or ("TPU",) if name != "CPU"})
        if kinds:
            yield Inexact(
                f"the accelerator 'xla' on {', '.join(kinds)}",
                why="no test has resumed a run there: of XLA devices the tests have CPUs only (PJRT_DEVICE=CPU)",
                fix="accelerator: cpu or cuda, where it matters",
                certain=False,
            )


xla = XLA()
tpu = XLA(name="xla")


def find_devices(environ: Mapping[str, str], root: Path, *, installed: bool) -> Devices:
    """The XLA devices that this process may use; `installed`: torch_xla is."""
    requested = environ.get("PJRT_DEVICE", "").upper()
    if requested and requested != "TPU":
        if not installed:
            return Devices(0, f"PJRT_DEVICE={requested}, but torch_xla is not installed")
        variable = "GPU_NUM_DEVICES" if requested in {"CUDA", "GPU", "ROCM"} else f"{requested}_NUM_DEVICES"
        given = environ.get(variable, "")
        count = int(given) if given.isdecimal() and int(given) else 1
        evidence = f"PJRT_DEVICE={requested}" + (f", {variable}={given}" if variable in environ else "")
        return Devices(count, evidence, (requested,) * count)
    chips, source = _chips(environ, root)
    if not chips:
        return Devices(0, "no TPU in /dev/accel* or /dev/vfio, and PJRT_DEVICE names no other device, such as CPU")
    wanted = environ.get("TPU_VISIBLE_CHIPS", environ.get("TPU_VISIBLE_DEVICES"))
    if wanted is not None:
        left = {int(item) for item in wanted.split(",") if item.strip().isdecimal()}
        chips, source = len([chip for chip in left if chip < chips]), f"{source}, TPU_VISIBLE_CHIPS={wanted!r}"
    kind = environ.get("TPU_ACCELERATOR_TYPE", "")
    # Versions 2 and 3 show the two cores of a chip as two devices; later ones show one.
    per_chip = 2 if re.match(r"v[23]-", kind) else 1
    return Devices(chips * per_chip, source, (f"TPU {kind}".strip(),) * chips * per_chip)


def _chips(environ: Mapping[str, str], root: Path) -> tuple[int, str]:
    for pattern, number in (("accel*", r"accel_?\d+"), ("vfio/*", r"\d+")):
        found = [path for path in (root / "dev").glob(pattern) if re.fullmatch(number, path.name)]
        if found and _is_tpu(environ, root):
            return len(found), f"/dev/{pattern.removesuffix('/*')}"
    return 0, ""


def _is_tpu(environ: Mapping[str, str], root: Path) -> bool:
    """Such device files also belong to other vendors' accelerators and to virtual machines."""
    if any(name.startswith("TPU_") for name in environ) or environ.get("PJRT_DEVICE", "").upper() == "TPU":
        return True
    for path in (root / "sys/bus/pci/devices").glob("*/vendor"):
        try:
            if path.read_text().strip() == GOOGLE and _is_compute(path.parent):
                return True
        except OSError:
            continue  # one device that cannot be read says nothing about the others
    return False


def _is_compute(device: Path) -> bool:
    """Google's virtual disks (class 0x01....) and network cards (0x02....) have the same vendor number."""
    return not (device / "class").read_text().startswith(("0x01", "0x02"))
