"""How many samples a batch holds, whatever it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def batch_size(batch: Any) -> int:
    """The samples in a batch: the first dimension of its first tensor, else the length of its first list; else 1."""
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.ndim else 1
    if isinstance(batch, Mapping):
        return next((batch_size(value) for value in batch.values()), 1)
    if isinstance(batch, (list, tuple)):
        first = batch[0] if batch else None
        return batch_size(first) if isinstance(first, (Tensor, Mapping, list, tuple)) else max(len(batch), 1)
    stated = getattr(batch, "batch_size", None)  # a packed sequence, a batch of graphs
    if isinstance(stated, int):
        return stated
    fields = getattr(batch, "__dict__", {}).values()
    return next((batch_size(value) for value in fields if isinstance(value, Tensor)), 1)
