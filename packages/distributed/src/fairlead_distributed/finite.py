"""Weights that are no numbers any more."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fairlead_distributed._sharded import is_dtensor


@torch.no_grad()
def non_finite_weights(module: nn.Module) -> list[str]:
    """The trained weights in which something is infinite or no number, as far as this rank holds them, in their order.

    One pass over the weights and, on an accelerator, one wait for it.

    Example:
        >>> line = nn.Linear(2, 1)
        >>> _ = line.bias.data.fill_(math.nan)
        >>> non_finite_weights(line)
        ['bias']
    """
    finite: dict[str, Tensor] = {}
    for name, weight in module.named_parameters():
        if weight.requires_grad and not isinstance(weight, nn.UninitializedParameter):
            held = weight.to_local() if is_dtensor(weight) else weight
            if held.numel() and not held.is_meta:
                finite[name] = torch.linalg.vector_norm(held, math.inf).isfinite()  # its largest value; copies nothing
    together = len({one.device for one in finite.values()}) == 1  # or the model is spread over several
    found = torch.stack(list(finite.values())).tolist() if together else [bool(one) for one in finite.values()]
    return [name for name, is_so in zip(finite, found, strict=True) if not is_so]
