"""A whole tensor, cut as a rank holds it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def like(value: Any, own: Any) -> Any:
    """A whole tensor cut as `own` is, without communication; anything else stays as it is."""
    if not isinstance(own, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    device = own.to_local().device
    return distribute_tensor(value.to(device), own.device_mesh, own.placements, src_data_rank=None)
