"""Tensors as vectors of float64: a complex number is two of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

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
