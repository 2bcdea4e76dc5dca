"""A processor with several NUMA nodes: one rank for each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from fairlead import AcceleratorConfigBase, AcceleratorPlugin, Devices, Resolution, hookimpl
from fairlead.findings import Inexact

NODES = Path("/sys/devices/system/node")


def cores_of_nodes() -> list[set[int]]:
    """The cores of each NUMA node, as Linux shows them: `0-3,8-11`."""
    found = []
    for file in sorted(NODES.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name[4:])):
        ranges = [part.partition("-") for part in file.read_text().strip().split(",") if part]
        found.append({core for low, _, high in ranges for core in range(int(low), int(high or low) + 1)})
    found = [cores for cores in found if cores]  # a node of memory alone has none
    return found or [set(range(os.cpu_count() or 1))]  # where the kernel shows none, the machine is one


class NumaAcceleratorConfig(AcceleratorConfigBase):
    """The processor; `devices: auto` starts a rank for each NUMA node, which stays on the cores of its node."""

    name: Literal["numa"] = "numa"
    """The tag."""


class Numa(AcceleratorPlugin):
    """NUMA nodes as devices. Its `priority` is the default, 0, so that `accelerator: auto` does not prefer it."""

    config = NumaAcceleratorConfig
    runtime = "fairlead_numerics.numa_runtime:build"
    engines = ("torch", "lightning")
    device_type = "cpu"

    @hookimpl
    def fairlead_devices(self, environ: Mapping[str, str]) -> Devices:
        """As many as have cores."""
        return Devices(len(cores_of_nodes()), f"NUMA nodes with cores in {NODES}")

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """A processor adds in one order, with the same number of threads."""
        return ()


numa = Numa()
