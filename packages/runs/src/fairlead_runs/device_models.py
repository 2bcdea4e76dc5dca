"""What is known of devices by their names, for decisions where there is no device: on a login node, in a check.

The table is `device_models.csv` beside this file. Memory is what the data sheet of the vendor says, in GB; a second
figure is that of a larger variant. AMD's GPUs also stand under their architecture, which is all that the kernel tells.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

from fairlead.errors import did_you_mean
from fairlead.findings import CheckResult, Finding
from fairlead.jobs import LoadedJob
from fairlead.plugins import default_plugins
from fairlead.resolution import Resolution

__all__ = ["DeviceModel", "Vendor", "device_names", "find_device", "nearest_devices", "vendors"]


@dataclass(frozen=True, slots=True)
class Vendor:
    """Who makes a device, and how torch drives it.

    Attributes:
        name: As on the product.
        accelerator: The name of Fairlead's accelerator; None: there is none.
        backend: The backend of torch.distributed that belongs to it, with what stands behind it.
        source: Where its devices' figures are from.
        missing: What is untested on it; None: the tests run on it.
    """

    name: str
    accelerator: str | None
    backend: str
    source: str
    missing: str | None = None


NVIDIA: Final = Vendor(
    "NVIDIA", "cuda", "nccl", "developer.nvidia.com/cuda-gpus", "runs where a GPU is: CI has none, it tests gloo"
)
AMD: Final = Vendor(
    "AMD",
    "cuda",
    "nccl (RCCL)",
    "rocm.docs.amd.com/en/latest/reference/gpu-arch-specs.html",
    "a ROCm build of torch drives it as cuda, and RCCL answers as nccl; never run here",
)
INTEL: Final = Vendor(
    "Intel", "xpu", "xccl", "intel.com/content/www/us/en/products", "tested with a stand-in for the device only"
)
APPLE: Final = Vendor("Apple", "mps", "none: one device", "apple.com/mac/compare", "never run here")
GOOGLE: Final = Vendor(
    "Google TPU", "xla", "xla", "cloud.google.com/tpu/docs", "never run here: torch-xla needs torch 2.9"
)
HOST: Final = Vendor("CPU", "cpu", "gloo", "the machine itself")
NOT_DRIVEN: Final = Vendor("another vendor", None, "none", "the vendor's own build of torch")


def vendors() -> tuple[Vendor, ...]:
    """Those whose devices Fairlead has an accelerator for."""
    return NVIDIA, AMD, INTEL, GOOGLE, APPLE, HOST


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """One model of a device.

    Attributes:
        name: As `resources.device` has it, `h100`.
        vendor: Who makes it.
        memory_gb: By the data sheet; of variants the smallest first; empty: not its own.
        capability: NVIDIA's compute capability `9.0`, AMD's architecture `gfx942`, else empty.
        bf16: Whether it computes in bfloat16 in hardware.
        fp8: Whether it computes in 8-bit floating point in hardware.
    """

    name: str
    vendor: Vendor
    memory_gb: tuple[int, ...]
    capability: str
    bf16: bool
    fp8: bool

    def memory_of(self, name: str) -> int | None:
        """The memory in GB of a device that is called so: of `a100-sxm4-80gb` the larger variant's.

        Example:
            >>> find_device("a100").memory_of("NVIDIA A100-SXM4-80GB")
            80
        """
        size = re.search(r"(\d+) ?gi?b", name.lower())
        if size and int(size[1]) in self.memory_gb:
            return int(size[1])
        return min(self.memory_gb, default=None)


def _read() -> tuple[DeviceModel, ...]:
    text = files("fairlead_runs").joinpath("device_models.csv").read_text(encoding="utf-8")
    by_name = {vendor.name: vendor for vendor in (*vendors(), NOT_DRIVEN)}
    return tuple(
        DeviceModel(
            row["name"],
            by_name[row["vendor"]],
            tuple(map(int, row["memory_gb"].split())),
            row["capability"],
            row["bf16"] == "yes",
            row["fp8"] == "yes",
        )
        for row in csv.DictReader(text.splitlines())
    )


_MODELS: Final = _read()


def device_names() -> tuple[str, ...]:
    """The names of all models, those of a vendor together, the newest first."""
    return tuple(model.name for model in _MODELS)


# What a name looks like where it is not simply one of the table with a space, a dash or an underscore in it.
_SPELLINGS: Final = (
    (r"v5litepod(-\d+)?|v5lite", "v5e"),
    (r"(v[2-6][ep]?|v7x)(-\d+)?", r"\1"),  # a slice, v4-8: the number of its cores
    (r"max gpu (\d+)|ponte ?vecchio|pvc", "max 1550"),
    (r"mi250x?.*", "mi250x"),
)


def find_device(name: str) -> DeviceModel | None:
    """What is known of a device by a name that a scheduler, a driver or a user gives it; None: nothing.

    Example:
        >>> find_device("NVIDIA H100 80GB HBM3").capability, find_device("v5litepod-16").name
        ('9.0', 'v5e')
        >>> find_device("h200x") is None
        True
    """
    words = " ".join(re.split(r"[\s_-]+", name.strip().lower()))
    for model in _MODELS:
        wanted = model.name.replace(" ", " ?")  # as full words, or written together: `rtx4090`
        if model.vendor not in (GOOGLE, APPLE) and re.search(rf"(?<![a-z0-9]){wanted}(?![a-z0-9])", words):
            return model
    plain = re.sub(r"^(google )?(cloud )?tpu[ -]?", "", name.strip().lower())
    for pattern, known in _SPELLINGS:
        if match := re.fullmatch(pattern, plain):
            return _by_name(match.expand(known))
    return _by_name(re.sub(r"^apple ", "", words).partition(" ")[0])


def _by_name(name: str) -> DeviceModel | None:
    return next((model for model in _MODELS if model.name == name), None)


def nearest_devices(name: str) -> list[str]:
    """The names that a wrong one may stand for, the nearest first; at most three.

    Example:
        >>> nearest_devices("h200x")[0]
        'h200'
    """
    left = list(device_names())
    found: list[str] = []
    while len(found) < 3 and (near := did_you_mean(name, left)):
        found.append(near)
        left.remove(near)
    return found


def check_device(loaded: LoadedJob, resolution: Resolution, environ: Mapping[str, str], cwd: Path) -> CheckResult:
    """A name that is not known is an error, unless its memory is given, as for a scheduler's own name of a GPU."""
    resources = loaded.job.resources if loaded.job is not None else None
    name = resources.device if resources is not None else None
    if name is None or name.lower() in default_plugins().names("accelerator"):
        return CheckResult()
    model = find_device(name)
    where = "resources.device"
    if model is None:
        near = nearest_devices(name.lower())
        meant = f"did you mean {near[0]!r}{_others(near[1:])}?" if near else "see `fairlead capabilities --devices`"
        if resources is not None and resources.memory_gib is not None:
            finding = Finding(
                "warning",
                "device-unknown",
                f"the device {name!r} is not known, and is taken for a GPU that torch drives as cuda",
                where=where,
                why="nothing is known of what it computes in",
                fix=meant,
            )
        else:
            finding = Finding(
                "error",
                "device-unknown",
                f"the device {name!r} is not known",
                where=where,
                why="nothing is known of its memory, and of what it computes in",
                fix=f"{meant}\nA GPU that your scheduler calls so: add its memory, as memory_gib: 80",
            )
    elif model.vendor.accelerator is None:
        finding = Finding(
            "error",
            "device-not-driven",
            f"no accelerator of Fairlead drives a {name}",
            where=where,
            why=f"it takes {model.vendor.source}",
            fix="a GPU or TPU; `fairlead capabilities --devices` lists those that are known",
        )
    else:
        return CheckResult()
    return CheckResult((finding,))


def _others(names: list[str]) -> str:
    return f" (or {', '.join(map(repr, names))})" if names else ""
