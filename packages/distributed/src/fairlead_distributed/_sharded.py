"""Sharded tensors and modules, recognised without importing what makes them, which takes each rank 0.6 s.

Where it was not imported, nothing can be an instance of its classes.

Parameters that only some of the ranks hold, such as the experts of a mixture: DTensors on a mesh of those ranks.

The other ranks have them too, under the same names and empty, so that all ranks talk about the same parameters in the
same order. What is only on some ranks has to be brought to the others by the caller that needs it in full.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor


def _is(value: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether it is a tensor spread over a device mesh."""
    return _is(value, "torch.distributed.tensor", "DTensor")


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its shard, or all of it."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def is_fully_sharded(value: object) -> TypeGuard[FSDPModule]:
    """Whether it is a module that `fully_shard` was applied to."""
    return _is(value, "torch.distributed.fsdp", "FSDPModule")


def is_fsdp1(value: object) -> TypeGuard[FullyShardedDataParallel]:
    """Whether it is wrapped in `FullyShardedDataParallel`."""
    return _is(value, "torch.distributed.fsdp", "FullyShardedDataParallel")


if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def absent(tensor: Any) -> bool:
    """Whether it is a DTensor of which this rank holds nothing, for it is no part of its mesh."""
    return is_dtensor(tensor) and tensor.device_mesh.get_coordinate() is None


def any_absent(tensors: Iterable[Any]) -> bool:
    """Whether some are. Each rank then lacks some, and all come to the same answer."""
    return any(map(absent, tensors))


def first_rank(mesh: DeviceMesh) -> int:
    """The first rank of a mesh, which speaks for it."""
    return int(mesh.mesh.flatten()[0])


def on_all_ranks(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The full tensor of a detached DTensor, also on a mesh of some ranks only; a collective of the group's ranks.

    Args:
        tensor: What each rank holds of it, perhaps nothing.
        group: All ranks that name it, such as those of a stage; None: all of the run.
    """
    if not is_dtensor(tensor):
        return tensor
    full = tensor.full_tensor()
    mesh = tensor.device_mesh
    if mesh.size() == dist.get_world_size(group):
        return full
    if absent(tensor):
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    full = full.contiguous()
    dist.broadcast(full, first_rank(mesh), group)
    return full
