"""Forward passes alone: for a validation, and for whatever calls the model outside of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fairlead_distributed.parallel.pipeline.micro_batches import joined

_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64),
)
_LONGEST = 64  # numbers in the header of a message: up to seven tensors of up to seven dimensions


def run_forward(
    stages: Sequence[nn.Module],
    indices: Sequence[int],
    owners: Sequence[int],
    calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> Any:
    """The output of all micro-batches, put together, on all ranks of the pipeline."""
    mine = dict(zip(indices, stages, strict=True))
    last = len(owners) - 1
    outputs, sends = [], []
    with torch.no_grad():
        for inputs, kwargs in calls:
            out: Any = None
            for index, stage in mine.items():
                if index == 0:
                    out = stage(*inputs, **kwargs)
                else:
                    given = out if index - 1 in mine else _receive(owners[index - 1], device, group)
                    out = stage(*given) if isinstance(given, tuple) else stage(given)
                if index < last and index + 1 not in mine:
                    sends += _send(out, owners[index + 1], device, group)
            if last in mine:
                outputs.append(out)
        for work, _ in sends:
            work.wait()
        return _to_everyone(joined(outputs) if last in mine else None, owners[last], last in mine, device, group)


def _send(value: Any, to: int, device: torch.device, group: Any) -> list[tuple[Any, Tensor]]:
    tensors = [one.contiguous() for one in (value if isinstance(value, tuple) else (value,))]
    header = [int(isinstance(value, tuple)), len(tensors)]
    for one in tensors:
        header += [_DTYPES.index(one.dtype), one.ndim, *one.shape]
    message = torch.tensor(header + [0] * (_LONGEST - len(header)), device=device)
    # A tensor that is being sent must stay alive.
    return [(dist.isend(one, group_dst=to, group=group), one) for one in (message, *tensors)]


def _receive(source: int, device: torch.device, group: Any) -> Any:
    message = torch.empty(_LONGEST, dtype=torch.int64, device=device)
    dist.recv(message, group_src=source, group=group)
    several, count, *rest = message.tolist()
    tensors = []
    for _ in range(count):
        dtype, dims, *rest = rest
        tensors.append(torch.empty(rest[:dims], dtype=_DTYPES[dtype], device=device))
        rest = rest[dims:]
        dist.recv(tensors[-1], group_src=source, group=group)
    return tuple(tensors) if several else tensors[0]


def _to_everyone(output: Any, owner: int, here: bool, device: torch.device, group: Any) -> Any:
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return output
    announced: list[Any] = [tree_map(_Kind.of, output) if here else None]
    dist.broadcast_object_list(announced, group_src=owner, group=group, device=device)
    given = iter(tree_leaves(output) if here else ())

    def shared(kind: Any) -> Any:
        mine = next(given, None)
        if not isinstance(kind, _Kind):
            return kind
        one = mine.contiguous() if mine is not None else torch.empty(kind.shape, dtype=kind.dtype, device=device)
        dist.broadcast(one, group_src=owner, group=group)
        return one

    return tree_map(shared, announced[0])


@dataclass(frozen=True)
class _Kind:
    """A tensor, as it is announced to others."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Any) -> Any:
        return cls(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
