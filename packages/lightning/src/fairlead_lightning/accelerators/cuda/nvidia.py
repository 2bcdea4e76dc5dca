"""Finds the GPUs of NVIDIA from what the kernel shows. Torch-free; `nvidia-smi` is queried only in doubt."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from fairlead.interfaces import Devices
from fairlead_lightning.accelerators.cuda.visible import GPU, visible

VARIABLE = "CUDA_VISIBLE_DEVICES"

SMI_TIMEOUT_S = 3.0


def nvidia_devices(environ: Mapping[str, str], root: Path) -> Devices:
    """The GPUs that this process may use: `/dev/nvidia<n>` is what a container was given, `/proc` names models."""
    gpus, source = _gpus(environ, root)
    if not gpus:
        return Devices(0, source)
    value = environ.get(VARIABLE)
    left = visible(value, gpus)
    # Without PCI order CUDA puts the fastest first, so an index says nothing about the model when there are two.
    sure = len({gpu.name for gpu in gpus}) == 1 or value is None or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    names = tuple(gpu.name for gpu in left if gpu.name) if sure else ()
    if value is None:
        return Devices(len(left), f"{source}; {VARIABLE} is not set", names)
    return Devices(len(left), f"{VARIABLE}={value!r}, of {len(gpus)} by {source}", names)


def _gpus(environ: Mapping[str, str], root: Path) -> tuple[list[GPU], str]:
    described = _described(root / "proc/driver/nvidia/gpus")
    numbers = {int(m[1]) for path in (root / "dev").glob("nvidia*") if (m := re.fullmatch(r"nvidia(\d+)", path.name))}
    if numbers:
        order = [minor for minor in described if minor in numbers] + sorted(numbers - described.keys())
        found = [described.get(minor, (None, None)) for minor in order]
        return [GPU(index, *gpu) for index, gpu in enumerate(found)], "/dev/nvidia*"
    doubt = "/proc/driver/nvidia" if described else "/dev/dxg" if (root / "dev/dxg").exists() else None
    if doubt is None:
        return [], "no /dev/nvidia*"
    # A host that makes the device files late, a container without GPUs, or WSL: only the driver knows.
    gpus = ask_nvidia_smi(environ)
    return gpus, "nvidia-smi" if gpus else f"{doubt} is there, but no /dev/nvidia*, and nvidia-smi lists none"


def _described(folder: Path) -> dict[int, tuple[str | None, str | None]]:
    """(model, UUID) by device minor, in the order of the PCI bus."""
    found: dict[int, tuple[str | None, str | None]] = {}
    for path in sorted(folder.glob("*/information")):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue  # masked in a container: then the device files alone count
        pairs = (line.partition(":") for line in lines)
        fields = {key.strip(): value.strip() for key, _, value in pairs}
        minor = fields.get("Device Minor", "")
        if minor.isdecimal() and fields.get("GPU Excluded", "No") != "Yes":
            uuid = fields.get("GPU UUID")
            found[int(minor)] = (fields.get("Model") or None, uuid if uuid and "?" not in uuid else None)
    return found


def ask_nvidia_smi(environ: Mapping[str, str]) -> list[GPU]:
    """What the driver's tool lists, within three seconds; nothing when it is absent or fails."""
    tool = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, "--query-gpu=name,uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=SMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    rows = [[cell.strip() for cell in line.rpartition(",")[::2]] for line in done.stdout.splitlines() if "," in line]
    return [GPU(index, name, uuid) for index, (name, uuid) in enumerate(rows)]
