"""Weights that layers of several stages share, such as an embedding that is the output matrix as well.

Each of these stages holds a copy. They begin alike; after each backward pass their gradients are added up, so the
optimizers of all take the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def group_of(ranks: tuple[int, ...], group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A group of some ranks of a pipeline; only these make it."""
    everyone = dist.get_process_group_ranks(group)
    members = sorted(everyone[rank] for rank in ranks)
    return dist.new_group(members, use_local_synchronization=True)  # type: ignore[no-any-return]


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
