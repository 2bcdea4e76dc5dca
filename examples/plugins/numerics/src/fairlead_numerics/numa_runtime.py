"""The accelerator itself; imported only when a run is built."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.fabric.accelerators import CPUAccelerator as FabricCPU
from lightning.pytorch.accelerators import CPUAccelerator as TrainerCPU

from fairlead import BuildContext
from fairlead_numerics.numa import NumaAcceleratorConfig, cores_of_nodes


def bind(local_rank: int) -> None:
    """Keeps this process on the cores of its node that it may use."""
    nodes = cores_of_nodes()
    allowed = os.sched_getaffinity(0) & nodes[local_rank % len(nodes)]
    if allowed:
        os.sched_setaffinity(0, allowed)


def build(config: NumaAcceleratorConfig, context: BuildContext) -> Any:
    """Lightning's accelerator for the processor, which binds its rank when the device is set up."""
    base: Any = TrainerCPU if context.engine == "trainer" else FabricCPU
    local_rank = int(context.resolution.value("local_rank") or 0)

    def setup_device(self: Any, device: torch.device) -> None:
        base.setup_device(self, device)
        bind(local_rank)

    return type("NumaAccelerator", (base,), {"setup_device": setup_device})()
