"""Weights that layers of several stages share, such as an embedding that is the output matrix as well.

Each of these stages holds a copy. They begin alike; after each backward pass their gradients are added up, so the
optimizers of all take the same step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairlead_distributed._sharded import is_dtensor


@dataclass
class Tied:
    """One such weight on this rank."""

    parameter: nn.Parameter
    ranks: tuple[int, ...]
    """The ranks of the pipeline that hold it, the one that counts it first."""
    group: dist.ProcessGroup | None
    counted: bool
    """Whether this rank is the one that counts it, in norms and checkpoints."""


def shared_by_stages(stages: Sequence[Sequence[nn.Module]], rank_of: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """For each parameter (by `id`) in layers of several ranks: these ranks, in the order of the stages."""
    seen: dict[int, dict[int, None]] = {}
    for stage, layers in enumerate(stages):
        for layer in layers:
            for parameter in layer.parameters():
                seen.setdefault(id(parameter), {})[rank_of[stage]] = None
    return {key: tuple(ranks) for key, ranks in seen.items() if len(ranks) > 1}


def groups_of(
    held: Iterable[tuple[int, ...]], group: dist.ProcessGroup | None
) -> dict[tuple[int, ...], dist.ProcessGroup | None]:
    """A process group for each of these sets of pipeline ranks that this rank is in; a collective of *all* ranks.

    Other pipelines of the run may need groups of their own, and torch makes groups safely only with all ranks at it.
    """
    everyone = dist.get_process_group_ranks(group)
    own = {tuple(ranks): tuple(sorted(everyone[rank] for rank in ranks)) for ranks in held}
    wanted: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(wanted, sorted(own.values()))
    made: dict[tuple[int, ...], Any] = {}
    for members in sorted({one for theirs in wanted for one in theirs}):
        made[members] = dist.new_group(list(members))
    return {ranks: made[members] for ranks, members in own.items() if dist.get_rank() in members}


def add_up(tied: Sequence[Tied]) -> None:
    """Sums the gradients of each over the ranks that hold it: a collective of these."""
    for one in tied:
        parameter = one.parameter
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad: Tensor = parameter.grad
        dist.all_reduce(grad.to_local() if is_dtensor(grad) else grad, group=one.group)
