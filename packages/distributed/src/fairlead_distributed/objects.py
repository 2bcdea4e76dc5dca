"""Small Python objects between the ranks; without a process group each is alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from fairlead_distributed.info import get_rank

T = TypeVar("T")


def broadcast_object(value: T) -> T:
    """Rank 0's value on every rank; the value itself when there is no group."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_rank_0(function: Callable[[], T]) -> T:
    """What a function gives on rank 0, on every rank; what it raises is raised on all. A collective."""
    result: T | Exception | None = None
    if get_rank() == 0:
        try:
            result = function()
        except Exception as error:  # also of the disk: the others would wait
            result = error
    result = broadcast_object(result)
    if isinstance(result, Exception):
        raise result
    return result  # type: ignore[return-value]


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What each rank gives, by rank, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
