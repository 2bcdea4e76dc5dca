"""What one rank does in the tests of `strategy: fsdp`: all scenarios of a world size in one start of the ranks."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import wrap
from torch.utils.data import DataLoader

from fairlead_distributed.activation_checkpointing import is_checkpointed
from fairlead_strategies import FSDPStrategyConfig
from fairlead_strategies.fsdp_runtime import build

sys.path.insert(0, str(Path(__file__).parent))
scenarios: Any = importlib.import_module("scenarios")
context = importlib.import_module("ranks").context

BLOCKS = ["torch.nn:Linear"]
BYTES = 4  # of a float32


class Watch(pl.Callback):
    """Notes loss, gradients and their norm in the first step, before they are clipped."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: dict[str, Tensor] = {}

    def on_train_batch_end(self, loop: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        if outputs is not None:
            self.losses.append(float(outputs["loss"]))

    def on_before_optimizer_step(self, loop: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if self.gradients:
            return
        strategy: Any = loop.strategy
        if hasattr(strategy, "whole_gradients"):
            self.gradients = strategy.whole_gradients()
        else:
            self.gradients = {n: p.grad.detach().clone() for n, p in module.named_parameters() if p.grad is not None}


def fsdp(**fields: Any) -> Any:
    config = FSDPStrategyConfig(**{"auto_wrap_policy": BLOCKS, **fields})
    return build(config, context(config, world_size=scenarios.world, devices=scenarios.world))


def weights(loop: pl.Trainer) -> dict[str, Tensor]:
    strategy: Any = loop.strategy
    found: dict[str, Tensor] = strategy.whole_parameters()
    return {name: value.double() for name, value in found.items()}


def single(make: Callable[[], Any], **kwargs: Any) -> tuple[dict[str, Tensor], Watch]:
    """The reference: one process, the whole batch, rank 0's initial weights."""
    watch = Watch()
    kwargs.setdefault("callbacks", []).append(watch)
    module = scenarios.seeded(make, 100)
    scenarios.trainer(None, **kwargs).fit(module, DataLoader(scenarios.data, batch_size=8))
    return {name: p.detach().double() for name, p in module.named_parameters()}, watch


def compare(strategy: Any, make: Callable[[], Any] = scenarios.Net, **kwargs: Any) -> dict[str, Any]:
    """Loss, gradients and weights of a training against one process; on all ranks, since each computes both."""
    expected, alone = single(make, **dict(kwargs))
    watch = Watch()
    _, loop = scenarios.pair(strategy, make, callbacks=[watch], **kwargs)
    found = weights(loop)
    start = {name: p.detach().double() for name, p in scenarios.seeded(make, 100).named_parameters()}
    losses = torch.tensor(watch.losses)
    dist.all_reduce(losses)
    return {
        "weights": scenarios.apart(expected, found),
        "gradients": scenarios.apart(alone.gradients, watch.gradients),
        "size": float(torch.stack([g.norm() for g in alone.gradients.values()]).norm()),
        "losses": float((losses / scenarios.world - torch.tensor(alone.losses)).abs().max()),
        "moved": min(float((start[name] - found[name]).abs().max()) for name in found),
        "steps": len(alone.losses),
    }


def scenario_table() -> dict[str, Callable[[], Any]]:
    return {
        "full_shard": lambda: compare(fsdp()),
        "one_unit": lambda: compare(fsdp(auto_wrap_policy=None)),
        "by_size": lambda: compare(fsdp(auto_wrap_policy=100)),
        "grad_op": lambda: compare(fsdp(sharding_strategy="SHARD_GRAD_OP")),
        "no_shard": lambda: compare(fsdp(sharding_strategy="NO_SHARD")),
        "offload": lambda: compare(fsdp(cpu_offload=True)),
        "checkpointed": lambda: compare(fsdp(activation_checkpointing=["torch.nn:Sequential"])),
        "clip_norm": lambda: compare(fsdp(), gradient_clip_val=0.05),
        "clip_value": lambda: compare(fsdp(), gradient_clip_val=0.001, gradient_clip_algorithm="value"),
        "accumulate": lambda: compare(fsdp(), accumulate_grad_batches=2),
        "flat": lambda: compare(fsdp(use_orig_params=False), FlatNet),
    }


class FlatNet(scenarios.Net):  # type: ignore[misc]  # loaded at run time
    """Gives the optimizer what there is after wrapping: flat parameters."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.trainer.model.parameters(), lr=0.02)


def run(rank: int, world: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, scenario in scenario_table().items():
        try:
            results[name] = scenario()
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
        dist.barrier()
    return results
