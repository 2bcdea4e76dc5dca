"""Finds the GPUs of AMD from the kernel's topology of compute nodes. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fairlead.interfaces import Devices
from fairlead_lightning.accelerators.cuda.visible import GPU, visible


def amd_devices(environ: Mapping[str, str], root: Path) -> Devices:
    """The GPUs that this process may use under ROCm.

    ROCR_VISIBLE_DEVICES limits what the driver shows; HIP_VISIBLE_DEVICES (or, without it, CUDA_VISIBLE_DEVICES) counts
    among those that are left ("GPU isolation techniques", ROCm documentation).
    """
    if not (root / "dev/kfd").exists():
        return Devices(0, "no /dev/kfd")
    gpus = _gpus(root)
    if not gpus:
        return Devices(0, "/dev/kfd is there, but no GPU in /sys/class/kfd")
    left, limits = gpus, []
    inner = next((name for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if name in environ), None)
    for name in ("ROCR_VISIBLE_DEVICES", inner):
        if name is not None and name in environ:
            left = visible(environ[name], left)
            limits.append(f"{name}={environ[name]!r}")
    names = tuple(gpu.name for gpu in left if gpu.name)
    source = "/sys/class/kfd"
    return Devices(len(left), f"{', '.join(limits)}, of {len(gpus)} by {source}" if limits else source, names)


def _gpus(root: Path) -> list[GPU]:
    found: list[GPU] = []
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*")
    for node in sorted((path for path in nodes if path.name.isdecimal()), key=lambda path: int(path.name)):
        try:
            words = [line.split() for line in (node / "properties").read_text().splitlines()]
        except OSError:
            continue  # a node of another container: the kernel refuses to show it
        properties = {pair[0]: pair[1] for pair in words if len(pair) == 2}
        if int(properties.get("simd_count", "0")) == 0:
            continue  # a processor
        minor = properties.get("drm_render_minor", "0")
        if minor != "0" and (root / "dev/dri").is_dir() and not (root / f"dev/dri/renderD{minor}").exists():
            continue  # the container was not given this one
        found.append(GPU(len(found), _name(properties), _uuid(properties)))
    return found


def _name(properties: Mapping[str, str]) -> str | None:
    """`AMD gfx942` from the packed version 90402; the kernel does not tell the name it is sold under."""
    version = int(properties.get("gfx_target_version", "0"))
    if not version:
        return None
    return f"AMD gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _uuid(properties: Mapping[str, str]) -> str | None:
    unique = int(properties.get("unique_id", "0"))
    return f"GPU-{unique:016x}" if unique else None
