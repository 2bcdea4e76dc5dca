"""The CPUs that this process may really use: those that it is bound to, as far as its container or job lets it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CPUs:
    """What this process may compute with.

    Attributes:
        count: How many CPUs.
        reason: What sets this number.
        numa_nodes: In how many NUMA nodes they are.
        sockets: On how many processors they are.
    """

    count: int
    reason: str
    numa_nodes: int = 1
    sockets: int = 1


def usable_cpus(root: Path = Path("/")) -> CPUs:
    """The CPUs of this process; `root` is where /proc and /sys are."""
    bound = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    count = len(bound)
    reason = "that of the machine" if count == os.cpu_count() else "that to which this process is bound"
    quota = cgroup_quota(root)
    if quota is not None and quota < count:
        count, reason = max(1, int(quota)), f"the quota of its control group, {quota:g}"
    return CPUs(count, reason, _numa_nodes(root, bound), _sockets(root, bound))


def cgroup_quota(root: Path = Path("/")) -> float | None:
    """How many CPUs' time the control groups of this process give it, the smallest of all; None: no limit.

    Both versions of control groups are read, as both may be mounted (kernel documentation: admin-guide/cgroup-v2.rst,
    scheduler/sched-bwc.rst).
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = ("sys/fs/cgroup",) if not controllers else ("sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct")
        for mount in mounts:
            folder = root / mount / path.lstrip("/")
            # In a container the path may be the host's, and the mount shows the container's own group.
            found += [_quota(one) for one in (folder, *folder.parents) if one.is_relative_to(root / mount)]
    return min((one for one in found if one is not None), default=None)


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
    except OSError:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _numa_nodes(root: Path, cpus: Sequence[int]) -> int:
    lists = (root / "sys/devices/system/node").glob("node[0-9]*/cpulist")
    return max(1, sum(bool(_listed(file.read_text()) & set(cpus)) for file in lists))


def _listed(text: str) -> set[int]:
    """The numbers of `0-3,8`."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def _sockets(root: Path, cpus: Sequence[int]) -> int:
    files = [root / f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id" for cpu in cpus]
    return max(1, len({file.read_text().strip() for file in files if file.exists()}))
