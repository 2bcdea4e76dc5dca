"""Tensors as vectors of float64: a complex number is two of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Rates = list[list[float]]
"""Learning rates of each step of an optimizer, of each of its groups."""


def wide(tensor: Tensor) -> Tensor:
    """In float64; a complex tensor of shape (...) becomes a real one of shape (..., 2).

    Example:
        >>> wide(torch.tensor([1 + 2j])).tolist()
        [[1.0, 2.0]]
    """
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj().to(torch.complex128).contiguous())
    return tensor.double()


def norm(tensor: Tensor) -> float:
    """The 2-norm."""
    return float(wide(tensor).square().sum().sqrt())


def distance(one: Tensor | None, other: Tensor) -> float:
    """The 2-norm of the difference; a missing tensor counts as zeros, and one of another shape is infinitely far."""
    if one is None:
        return norm(other)
    return norm(wide(one) - wide(other)) if one.shape == other.shape else math.inf


def dot(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The inner product of two gradients, as one vector each."""
    return sum(float((wide(one[n]) * wide(other[n])).sum()) for n in one)


def bytes_of(tensor: Tensor) -> memoryview:
    """Its values in memory, the same for tensors that are the same bit by bit."""
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return plain.resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().data


def identical(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether they hold the same bits under the same names."""
    return one.keys() == other.keys() and all(bytes_of(one[name]) == bytes_of(other[name]) for name in one)


Part = tuple[int, int, int]
"""The batch of a step, the replica, and the micro-batch of that batch."""
Shares = dict[Part, float]
"""The weight of each part in a gradient."""

CLOSE: Final = 1e-3
"""A relative distance below which an explanation holds; the faults themselves are of the size of the gradient."""


def fitted(gradients: Tensors, parts: Mapping[Part, Tensors]) -> tuple[Shares, float]:
    """The share of each part in the gradients, and what is left of them, relative to them."""
    names = [n for n in gradients if any(n in one for one in parts.values())]
    if not names:
        return {}, math.inf
    # The Gram matrix alone: the gradients of all parameters side by side would take much memory.
    keys = list(parts)
    held = [{n: wide(parts[key].get(n, torch.zeros_like(gradients[n]))) for n in names} for key in keys]
    wanted = {n: wide(gradients[n]) for n in names}
    gram = torch.tensor([[dot(a, b) for b in held] for a in held], dtype=torch.float64)
    right = torch.tensor([dot(a, wanted) for a in held], dtype=torch.float64)
    if not (gram.isfinite().all() and right.isfinite().all()):  # a mean over nothing
        return {}, math.inf
    share: Tensor = torch.linalg.lstsq(gram, right.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    off = {n: wanted[n] - sum(float(s) * one[n] for s, one in zip(share, held, strict=True)) for n in names}
    size = math.sqrt(dot(wanted, wanted))
    left = math.sqrt(dot(off, off)) / size if size else math.inf
    return dict(zip(keys, share.tolist(), strict=True)), left


def factor_of(tensors: Mapping[str, Any], exact: Tensors) -> tuple[float, float]:
    """The multiple of the reference that is nearest, and how far it is off, relative to the tensors."""
    own = {n: wide(tensors[n]) for n in tensors if n in exact}
    true = {n: wide(exact[n]) for n in own}
    square, size = dot(true, true), math.sqrt(dot(own, own))
    if not square or not size:
        return 0.0, math.inf
    factor = dot(own, true) / square
    off = {n: own[n] - factor * true[n] for n in own}
    return factor, math.sqrt(dot(off, off)) / size
