"""How the tokens of a sequence are divided among ranks, and put together again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fairlead.errors import ConfigError
from fairlead_distributed.parallel._comm import gathered


@dataclass(frozen=True)
class Layout:
    """Which chunks of a sequence each rank has.

    Attributes:
        ranks: How many share it.
        rank: This one.
        balance: Two chunks for each rank, the `r`-th of all from the head and from the tail; else one.
    """

    ranks: int
    rank: int
    balance: bool

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The numbers of a rank's chunks, in their order in the sequence."""
        return (rank, 2 * self.ranks - 1 - rank) if self.balance else (rank,)

    @property
    def count(self) -> int:
        """Chunks in a sequence."""
        return 2 * self.ranks if self.balance else self.ranks

    def own(self, x: Tensor, dim: int) -> Tensor:
        """This rank's chunks of a whole tensor."""
        if x.shape[dim] % self.count:
            each = "two parts for each rank" if self.balance else "one part for each rank"
            raise ConfigError(
                f"sequences of {x.shape[dim]} tokens cannot be divided evenly among {self.ranks} ranks",
                why=f"context parallelism makes {self.count} parts, {each}, and {x.shape[dim]} is no multiple of it",
                fix=f"pad or cut sequences to a multiple of {self.count}",
            )
        parts = x.chunk(self.count, dim)
        return torch.cat([parts[number] for number in self.chunks(self.rank)], dim)

    def in_order(self, x: Tensor, dim: int) -> Tensor:
        """The whole sequence, of what the ranks have, one rank's after the other's."""
        if not self.balance:
            return x
        parts = x.chunk(self.count, dim)
        numbers = [number for rank in range(self.ranks) for number in self.chunks(rank)]
        return torch.cat([parts[numbers.index(number)] for number in range(self.count)], dim)

    def by_rank(self, x: Tensor, dim: int) -> Tensor:
        """The inverse of `in_order`."""
        if not self.balance:
            return x
        parts = x.chunk(self.count, dim)
        return torch.cat([parts[number] for rank in range(self.ranks) for number in self.chunks(rank)], dim)


def own_tokens(layout: Layout, length: int, device: torch.device) -> Tensor:
    """The positions of a rank's `length` tokens in the whole sequence."""
    # Not intercepted: this is what an intercepted `arange` is answered with.
    with torch._C.DisableTorchFunction():  # type: ignore[attr-defined, unused-ignore]
        return layout.own(torch.arange(length * layout.ranks, device=device), 0)


def split_sequence(x: Tensor, dim: int, layout: Layout, group: dist.ProcessGroup) -> Tensor:
    """Whole in, this rank's tokens out. The gradient is gathered, and divided as averaged gradients are."""
    out: Tensor = _Split.apply(x, dim, layout, group)  # type: ignore[no-untyped-call]
    return out


def gather_sequence(x: Tensor, dim: int, layout: Layout, group: dist.ProcessGroup) -> Tensor:
    """This rank's tokens in, whole out, for ranks that all do the same with it.

    The gradient is this rank's part, times the number of ranks: averaged over them, parameters' gradients are right.
    """
    out: Tensor = _Gather.apply(x, dim, layout, group)  # type: ignore[no-untyped-call]
    return out


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, layout: Layout, group: dist.ProcessGroup) -> Tensor:
        ctx.args = dim, layout, group
        return layout.own(x, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        dim, layout, group = ctx.args
        return layout.in_order(gathered(grad, dim, group), dim) / layout.ranks, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, layout: Layout, group: dist.ProcessGroup) -> Tensor:
        ctx.args = dim, layout
        return layout.in_order(gathered(x, dim, group), dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        dim, layout = ctx.args
        return layout.own(grad, dim) * layout.ranks, None, None, None
