"""A batch cut into equal parts, the same for all stages; and forward passes alone, for a validation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from fairlead.errors import ConfigError


def rows_of(batch: Any) -> int:
    """The size of the first dimension of the first tensor.

    Example:
        >>> rows_of({"x": torch.zeros(8, 3), "scale": 2.0})
        8
    """
    sizes = [len(one) for one in tree_flatten(batch)[0] if isinstance(one, Tensor) and one.ndim]
    if not sizes:
        raise ConfigError(
            "a batch without a tensor that has rows cannot be cut into micro-batches",
            where="Pipeline",
            why=f"it is {type(batch).__name__}",
            fix="let the first dimension of its tensors be the samples",
        )
    return sizes[0]


def cut(batch: Any, parts: int) -> list[Any]:
    """Equal parts of a batch along the first dimension of its tensors, as views; everything else goes to all of them.

    Raises:
        ConfigError: The tensors do not have the same number of rows, or they cannot be cut evenly.

    Example:
        >>> [(x.tolist(), name) for x, name in cut((torch.arange(4), "a"), 2)]
        [([0, 1], 'a'), ([2, 3], 'a')]
    """
    if parts == 1:
        return [batch]
    leaves, spec = tree_flatten(batch)
    rows = rows_of(batch)
    pieces: list[Sequence[Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.ndim == 0:
            pieces.append([leaf] * parts)
            continue
        if len(leaf) != rows or rows % parts:
            raise ConfigError(
                f"a tensor of shape {tuple(leaf.shape)} cannot be cut into {parts} micro-batches of a batch of {rows}",
                where="Pipeline",
                why="all tensors of a batch are cut alike, along their first dimension",
                fix="keep what belongs to all samples in the model, or repeat it for each sample",
            )
        pieces.append(leaf.split(rows // parts))  # type: ignore[no-untyped-call]
    return [tree_unflatten(list(piece), spec) for piece in zip(*pieces, strict=True)]


def joined(parts: Sequence[Any]) -> Any:
    """The opposite of `cut`, for what a model returns: tensors are put together along their first dimension."""
    if len(parts) == 1:
        return parts[0]
    flat = [tree_flatten(part) for part in parts]
    leaves = [
        torch.cat(same) if isinstance(same[0], Tensor) else same[0] for same in zip(*(f[0] for f in flat), strict=True)
    ]
    return tree_unflatten(leaves, flat[0][1])


def signature(value: Any) -> tuple[Any, ...]:
    """What the shape of everything that follows depends on: structure, shapes, and number formats."""
    leaves, spec = tree_flatten(value)
    shapes = (
        (tuple(one.shape), one.dtype, one.requires_grad) if isinstance(one, Tensor) else repr(one) for one in leaves
    )
    return (str(spec), *shapes)


def digest(value: Any) -> str:
    """A hash of all that a batch holds; costs a copy to the CPU."""
    summed = hashlib.blake2b(digest_size=16)
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, Tensor):
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            summed.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            summed.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        elif isinstance(leaf, (int, float, str, bool, bytes)) or leaf is None:
            summed.update(repr(leaf).encode())
    return summed.hexdigest()


_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64),
)


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
    messages = (torch.tensor([len(header)], device=device), torch.tensor(header, device=device), *tensors)
    # A tensor that is being sent must stay alive.
    return [(dist.isend(one, group_dst=to, group=group), one) for one in messages]


def _receive(source: int, device: torch.device, group: Any) -> Any:
    length = torch.empty(1, dtype=torch.int64, device=device)
    dist.recv(length, group_src=source, group=group)
    header = torch.empty(int(length), dtype=torch.int64, device=device)
    dist.recv(header, group_src=source, group=group)
    several, count, *rest = header.tolist()
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
