"""What stages have in common: the norm of the full model, and weights that layers of several stages share.

Each of these stages holds a copy. They begin alike; after each backward pass their gradients are added up, so the
optimizers of all take the same step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairlead_distributed._sharded import local_part
from fairlead_distributed.gradients import clip_grad_norm


def clip_grad_norm_over_stages(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    group: dist.ProcessGroup | None,
    copies: Iterable[Tensor] = (),
    stage: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scales the gradients of all stages so that their joint norm is at most `max_norm`: a collective of the pipeline.

    The norm over one stage alone would scale each stage differently: another direction, not only another length.

    Args:
        parameters: This rank's parameters; sharded ones count with all their shards.
        max_norm: The largest norm allowed.
        norm_type: p of the p-norm, above 0; `inf` is the largest absolute value.
        group: The ranks of this pipeline; None: all ranks.
        copies: Parameters that an earlier stage holds too (tied weights): scaled, but counted there.
        stage: The ranks that share this stage, where some hold none of a parameter (divided experts).

    Returns:
        The norm before clipping, shape (), the same on all ranks of the pipeline.
    """
    own, copied = list(parameters), list(copies)
    with torch.no_grad():
        # An infinite limit measures and scales nothing.
        local = clip_grad_norm(own, math.inf, norm_type, group=stage).to(torch.float64)
        power = local if math.isinf(norm_type) else local**norm_type
        grads = [one.grad for one in (*own, *copied) if one.grad is not None]
        device = grads[0].device if grads else local.device
        power = power.to(device if device.type != "mps" else "cpu")
        if math.isinf(norm_type):
            pair = torch.stack([power.nan_to_num(nan=0.0, posinf=math.inf), power.isnan().to(power)])
            dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=group)
            total = torch.where(pair[1] > 0, math.nan, pair[0])
        else:
            dist.all_reduce(power, group=group)
            total = power ** (1.0 / norm_type)
        total = total.to(torch.float32)
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(coefficient.to(grad.device))
    return total


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
        dist.all_reduce(local_part(parameter.grad), group=one.group)
