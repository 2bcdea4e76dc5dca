"""Main memory, device memory and CPUs, as far as they belong to this task."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from fairlead_diagnostics.checking import Bench, Result

_GIB: Final = 1 << 30
_ENOUGH: Final = 0.9
"""The part of the request that has to be free: drivers and the operating system take some for themselves."""


def cpus(bench: Bench) -> Result:
    """The CPUs that this process may use."""
    mine, all_of_it = len(os.sched_getaffinity(0)), os.cpu_count() or 0
    quota = _quota()
    limited = f", {quota:g} by the cgroup's quota" if quota is not None and quota < mine else ""
    return Result(True, f"{mine} of {all_of_it} for this process{limited}")


def free(bench: Bench) -> Result:
    """Main memory of this cgroup, and the memory of each device, against what the job asks."""
    requested = bench.requested
    available, limit, source = host_memory()
    details = [f"{available / _GIB:.1f} GiB free of {limit / _GIB:.1f} GiB ({source})"]
    ok = requested.host_memory_gib is None or available >= _ENOUGH * requested.host_memory_gib * _GIB
    if not ok:
        details[0] += f"; the job asks for {requested.host_memory_gib:g} GiB"
    warns = False
    if requested.device == "cuda" and (requested.found or requested.count):
        devices, ok_there, warns = _devices(bench)
        ok, details = ok and ok_there, details + devices
    return Result(ok, "; ".join(details), warns=warns)


def host_memory() -> tuple[int, int, str]:
    """Bytes that are free and that there are, of the machine or of the tightest cgroup around this process."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    found = (available, total, "this machine")
    for folder in _cgroups():
        try:
            limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
            # Cached files count as used, and go when memory is requested.
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            left = limit - used + int(stat.get("inactive_file", 0))
        except (OSError, ValueError):  # `max`: no limit here
            continue
        if left < found[0]:
            found = (left, limit, "this cgroup")
    return found


def _cgroups() -> list[Path]:
    """The cgroups around this process, of version 2, the innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line.partition("::")[2] for line in lines if line.startswith("0::")), None)
    if own is None:
        return []
    root = Path("/sys/fs/cgroup")
    inner = root / own.lstrip("/")
    return [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root)]


def _quota() -> float | None:
    quotas = []
    for folder in _cgroups():
        try:
            quota, period = (folder / "cpu.max").read_text().split()
            quotas.append(int(quota) / int(period))
        except (OSError, ValueError):
            continue
    return min(quotas, default=None)


def _devices(bench: Bench) -> tuple[list[str], bool, bool]:
    if "torch" not in sys.modules and not _has_torch():
        return ["device memory not looked at: torch is not installed"], True, False
    import torch

    bench.progress()
    details, ok, warns, requested = [], True, False, bench.requested.memory_gib
    for index in range(torch.cuda.device_count()):
        left, total = torch.cuda.mem_get_info(index)
        bench.progress()
        short = requested is not None and left < _ENOUGH * requested * _GIB
        taken = left < _ENOUGH * total
        ok, warns = ok and not short, warns or taken
        if short or taken:
            why = f"; the job asks for {requested:g} GiB" if short else "; another process has the rest"
            details.append(f"cuda:{index} {left / _GIB:.1f} GiB free of {total / _GIB:.1f} GiB{why}")
    return details, ok, warns


def _has_torch() -> bool:
    import importlib.util

    return importlib.util.find_spec("torch") is not None
