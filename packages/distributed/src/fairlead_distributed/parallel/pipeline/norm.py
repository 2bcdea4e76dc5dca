"""Clipping by the norm of the whole model, of which each rank holds some stages."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

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
