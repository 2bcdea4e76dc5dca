"""A batch cut into equal parts, and what makes sure that all stages see the same one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

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
