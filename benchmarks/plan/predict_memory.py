"""What `fairlead plan` says of the cases of `measure_memory.py`."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from lightning.pytorch import LightningModule

from benchmarks.plan.measure_memory import batch_of, module_of
from fairlead_distributed.parallel.plans import automatic
from fairlead_planning.layouts import Layout
from fairlead_planning.memory import memory
from fairlead_planning.profile import Profile
from fairlead_planning.trace import Work, trace
from fairlead_strategies.layout import Layout as Mesh

LAYOUTS: dict[str, Layout] = {
    "ddp": Layout("ddp", Mesh(replicate=4)),
    "fsdp2": Layout("fsdp2", Mesh(shard=4), sharding="full"),
    "fsdp2 kept": Layout("fsdp2", Mesh(shard=4), sharding="gradients"),
    "fsdp2 checkpointed": Layout("fsdp2", Mesh(shard=4), sharding="full", checkpointing="full"),
    "hsdp": Layout("hybrid", Mesh(replicate=2, shard=2), sharding="full"),
    "tensor": Layout("hybrid", Mesh(tensor=4)),
    "tensor and shards": Layout("hybrid", Mesh(tensor=2, shard=2), sharding="full"),
    "sequence": Layout("hybrid", Mesh(tensor=2, shard=2), sharding="full", sequence=True),
    "context": Layout("hybrid", Mesh(context=2, shard=2), sharding="full"),
    "expert": Layout("hybrid", Mesh(shard=4, expert=2), sharding="full"),
    "pipeline": Layout("hybrid", Mesh(pipeline=2, shard=2), sharding="full", accumulation=4),
    "zero 1": Layout("deepspeed_stage_1", Mesh(shard=4), sharding="optimizer", bucket=500_000),
    "zero 2": Layout("deepspeed_stage_2", Mesh(shard=4), sharding="gradients", bucket=500_000),
    "zero 3": Layout("deepspeed_stage_3", Mesh(shard=4), sharding="full", bucket=500_000),
}


@cache
def profile_of(name: str, rows: int, precision: str, words: str) -> Profile:
    """The traced step."""

    def model() -> Any:
        return module_of(name)

    def plan(module: Any) -> dict[str, str]:
        if not words:
            return {}
        return {n: one[0] for n, one in automatic(module, 2, words == "sequence").layers.items()}

    def loss(module: Any, batch: Any) -> Any:
        module.log = lambda *args, **kwargs: None
        return module.training_step(batch, 0)

    def optimizers(module: Any) -> list[Any]:
        if name.startswith("example"):
            return [torch.optim.AdamW(module.parameters(), fused=True)]
        return [module.configure_optimizers()]

    return trace(Work(model, batch_of(name, rows), loss, optimizers, precision, "cpu", plan))


def predict(name: str, strategy: str, rows: int, precision: str) -> list[Any]:
    """For each stage its memory."""
    layout = LAYOUTS[strategy]
    words = "sequence" if layout.sequence else "tensor" if layout.mesh.tensor > 1 else ""
    profile = profile_of(name, rows // layout.accumulation, precision, words)
    return memory(profile, layout, "cpu")


__all__ = ["LAYOUTS", "LightningModule", "predict"]
