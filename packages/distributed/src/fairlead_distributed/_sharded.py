"""Recognise sharded tensors and modules without importing what makes them, which takes each rank 0.6 s.

Where it was not imported, nothing can be an instance of its classes.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor


def _is(value: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether it is a tensor spread over a device mesh."""
    return _is(value, "torch.distributed.tensor", "DTensor")


def is_fully_sharded(value: object) -> TypeGuard[FSDPModule]:
    """Whether it is a module that `fully_shard` was applied to."""
    return _is(value, "torch.distributed.fsdp", "FSDPModule")


def is_fsdp1(value: object) -> TypeGuard[FullyShardedDataParallel]:
    """Whether it is wrapped in `FullyShardedDataParallel`."""
    return _is(value, "torch.distributed.fsdp", "FullyShardedDataParallel")
