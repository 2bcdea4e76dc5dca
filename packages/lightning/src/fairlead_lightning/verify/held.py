"""What the optimizers of a training hold for each parameter, whole and by the parameters' names."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fairlead_distributed._apart import any_absent, on_all_ranks
from fairlead_distributed._sharded import is_dtensor
from fairlead_distributed.full_state import plain_name
from fairlead_distributed.objects import gather_objects
from fairlead_lightning.verify.numbers import Tensors


def optimizer_state(trainer: L.Trainer, module: L.LightningModule) -> Tensors | None:
    """`exp_avg of head.weight` and the rest, as copies on the CPU; a collective of all ranks.

    Returns:
        None where the strategy cannot tell it.
    """
    optimizers = [getattr(one, "optimizer", one) for one in trainer.optimizers]
    strategy: Any = trainer.strategy
    if hasattr(strategy, "full_optimizer_state"):  # of flat parts: FSDP's first generation, DeepSpeed
        held = [strategy.full_optimizer_state(one) for one in optimizers]
        if any(one is None for one in held):
            return None
        return {
            f"{key} of {name}": value.detach().to("cpu", copy=True)
            for one in held
            for name, state in one.items()
            for key, value in state.items()
        }
    if not all(isinstance(one, Optimizer) for one in optimizers):
        return None
    if hasattr(strategy, "own_parameters"):  # stages, each of which some ranks hold
        found = _states(dict(strategy.own_parameters()), optimizers, strategy.stage_group, alone=False)
        together: Tensors = {}
        for one in reversed(gather_objects(found)):
            together.update(one)
        return {**together, **found}
    if hasattr(strategy, "full_parameters"):
        return None
    named = {plain_name(name): parameter for name, parameter in module.named_parameters()}
    return _states(named, optimizers, None, alone=trainer.world_size == 1)


@torch.no_grad()
def _states(named: dict[str, Any], optimizers: list[Any], stage: dist.ProcessGroup | None, *, alone: bool) -> Tensors:
    own: dict[tuple[str, str], Tensor] = {}
    for name, parameter in named.items():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    own[name, key] = value.detach()
                elif isinstance(value, int | float) and not isinstance(value, bool):
                    own[name, key] = torch.tensor(float(value))
    # A rank whose optimizer misses a sharded parameter takes part all the same: the others would wait for its shard.
    split = {key: is_dtensor(value) for key, value in own.items()}
    apart = any_absent(named.values())
    every = [split] if alone and not apart else gather_objects(split, stage)
    keys = {key: together for rank in reversed(every) for key, together in rank.items()}
    found: Tensors = {}
    for (name, key), together in keys.items():
        if name not in named:
            continue  # of another stage
        value = own.get((name, key))
        if apart and not together and is_dtensor(named[name]):
            continue  # a count of steps, which ranks without this expert have not made
        if value is None and together:
            value = torch.zeros_like(named[name].detach())
        if value is None:
            continue
        whole = on_all_ranks(value, stage) if apart else _whole(value)
        found[f"{key} of {name}"] = whole.to("cpu", copy=True)
    return found


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return whole


def rates(optimizer: Any) -> list[float]:
    """The learning rate of each group."""
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
