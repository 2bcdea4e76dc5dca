"""Tensors as bytes, which every backend can send, and in a few numbers what they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fairlead_distributed.errors import TensorMismatchError
from fairlead_distributed.torch_names import all_gather_single

# Every dtype of torch in an order that is the same on all ranks: the number of a dtype in a header.
_DTYPES = sorted({str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})
_HEADER_DIMS = 14


def text_of(tensor: Tensor) -> str:
    """Dtype and shape, for a person."""
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's memory: no backend knows every dtype (float8, bool), each can move bytes."""
    return tensor.view(-1).view(torch.uint8)


def tensor_of(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor that has these bytes; there may be more of them."""
    return data[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def shapes_over_ranks(tensor: Tensor, operation: str, group: dist.ProcessGroup | None) -> list[tuple[int, ...]]:
    """The shapes of all ranks' tensors, where they differ in nothing else."""
    dims = list(tensor.shape)[:_HEADER_DIMS]
    numbers = [_DTYPES.index(str(tensor.dtype)), tensor.dim(), *dims, *[0] * (_HEADER_DIMS - len(dims))]
    header = torch.tensor(numbers, device=tensor.device)
    headers = header.new_empty(dist.get_world_size(group) * len(header))
    all_gather_single(headers, header, group=group)
    rows = headers.view(-1, len(header)).tolist()
    if all(row[:2] == rows[0][:2] for row in rows):
        return [tuple(row[2 : 2 + row[1]]) for row in rows]
    seen = [
        f"rank {r}: {_DTYPES[row[0]]} {tuple(row[2 : 2 + row[1]])}"
        for r, row in zip(dist.get_process_group_ranks(group), rows, strict=True)
    ]
    odd = next(r for r, row in enumerate(rows) if row[:2] != rows[0][:2])
    raise TensorMismatchError(
        f"{operation} got tensors that differ over the ranks: {seen[odd]}, but {seen[0]}",
        where=f"rank {dist.get_rank()}: {text_of(tensor)}",
        why="\n".join(seen[:16]),
        fix="bring them to one dtype and number of dimensions first",
    )
