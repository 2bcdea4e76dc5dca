"""By how much two tensors differ, bit by bit, a part at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

__all__ = ["Difference", "compare"]

_PART: Final = 1 << 22
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """How two tensors of one shape and dtype differ.

    Attributes:
        count: Elements whose bits differ; +0 and -0 differ, a NaN equals the same NaN.
        total: Elements there are.
        max_abs: The largest absolute difference; inf where one is infinite or NaN and the other is not.
        max_rel: The largest difference divided by the larger of both magnitudes.
        max_ulp: The most representable numbers that lie between two; None for integers.
    """

    count: int
    total: int
    max_abs: float
    max_rel: float
    max_ulp: int | None


def compare(a: torch.Tensor, b: torch.Tensor) -> Difference | None:
    """The difference of two tensors of one shape and dtype; None when they are equal in every bit.

    Example:
        >>> compare(torch.ones(2), torch.tensor([1.0, 1.5]))                         # doctest: +SKIP
        Difference(count=1, total=2, max_abs=0.5, max_rel=0.333..., max_ulp=4194304)
    """
    if a.is_sparse or a.is_quantized or a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    first, second = a.reshape(-1), b.reshape(-1)
    count, ulp = 0, 0
    largest, relative = 0.0, 0.0
    for start in range(0, first.numel(), _PART):
        x, y = (side[start : start + _PART].contiguous() for side in (first, second))
        bits = _BITS[x.element_size()]
        other = x.view(bits) != y.view(bits)
        found = int(other.sum())
        if not found:
            continue
        count += found
        x, y = x[other], y[other]
        apart, part = _apart(x, y)
        largest, relative = max(largest, apart), max(relative, part)
        if x.is_floating_point():
            ulp = max(ulp, _ulp(x, y))
    if not count:
        return None
    return Difference(count, first.numel(), largest, relative, ulp if first.is_floating_point() else None)


def _apart(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """The largest absolute and relative difference."""
    if not x.is_floating_point() and x.element_size() == 8:
        apart = max(abs(p - q) for p, q in zip(x.tolist(), y.tolist(), strict=True))
        return float(apart), apart / max(1, int(x.abs().max()), int(y.abs().max()))
    p, q = x.double(), y.double()
    apart = (p - q).abs()
    apart = torch.where(p == q, 0.0, torch.where(apart.isnan(), math.inf, apart))
    size = torch.maximum(p.abs(), q.abs())
    part = torch.where(apart == 0, 0.0, apart / size)
    return float(apart.max()), float(torch.where(part.isnan(), math.inf, part).max())


def _ulp(x: torch.Tensor, y: torch.Tensor) -> int:
    """How many representable numbers apart two sets of numbers are at most."""
    bits = _BITS[x.element_size()]
    if x.element_size() == 1:
        return 0  # numbers of eight bits have several formats, and NaNs in odd places
    lowest = torch.iinfo(bits).min
    p, q = (side.view(bits).to(torch.int64) for side in (x, y))
    # Negative numbers count downwards from zero.
    p, q = (torch.where(side < 0, lowest - side, side) for side in (p, q))
    same_side = (p < 0) == (q < 0)
    near = torch.where(same_side, p - q, 0).abs()
    far = [abs(int(a)) + abs(int(b)) for a, b in zip(p[~same_side].tolist(), q[~same_side].tolist(), strict=True)]
    return max(int(near.max()), max(far, default=0))
