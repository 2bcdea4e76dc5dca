"""Collectives with a gradient, each beside what its backward pass sends.

A tensor inside a group is *replicated* (every rank has all of it), *split* (every rank has a part of a dimension) or
*partial* (the ranks' tensors have to be added). The gradient of a replicated tensor is replicated or partial, and
which of the two it is decides the backward pass: that is where the field's wrong scales come from. So each function
says both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fairlead.errors import ConfigError
from fairlead_distributed.collectives import all_gather_single, reduce_scatter_single


def copy_to_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Replicated in, replicated out; the gradient comes back partial and is added up."""
    return _call(_Copy, x, group)


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Partial in, replicated out; the gradient comes back replicated and is passed on."""
    return _call(_Sum, x, group)


def gather_for_parts(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Split in, replicated out, for ranks that each continue with a part: the gradient comes back partial."""
    return _call(_Gather, x, dim, group, True)


def gather_for_all(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Split in, replicated out, for ranks that all do the same with it: the gradient comes back replicated."""
    return _call(_Gather, x, dim, group, False)


def sum_and_split(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Partial in, split out; the gradient comes back split and is gathered."""
    return _call(_SumAndSplit, x, dim, group)


def split_for_parts(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Replicated in, split out; the gradient comes back split and is gathered."""
    return _call(_Split, x, dim, group)


def all_to_all(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Sends `sent[i]` rows to rank `i` and gets `received[i]` rows from it; the gradient goes the way back."""
    return _call(_AllToAll, x, sent, received, group)


def _call(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    out: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return out


def added(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks, in a new tensor."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def gathered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The ranks' tensors of one shape, one after the other along `dim`."""
    ranks = dist.get_world_size(group)
    parts = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    all_gather_single(parts, x.contiguous(), group=group)
    return torch.cat(parts.chunk(ranks), dim) if dim else parts


def part(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of a dimension that all ranks share evenly."""
    ranks = dist.get_world_size(group)
    if x.shape[dim] % ranks:
        raise ConfigError(
            f"dimension {dim} of a tensor of shape {tuple(x.shape)} cannot be divided among {ranks} ranks",
            why=f"{x.shape[dim]} is no multiple of {ranks}",
            fix=f"make it a multiple of {ranks}: with padding, or with another length of sequence",
        )
    return x.chunk(ranks, dim)[dist.get_rank(group)].contiguous()


def _summed_part(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    part(x, dim, group)  # refuses what cannot be divided
    rows = torch.cat(x.chunk(dist.get_world_size(group), dim)) if dim else x.contiguous()
    out = rows.new_empty((rows.shape[0] // dist.get_world_size(group), *rows.shape[1:]))
    reduce_scatter_single(out, rows, group=group)
    return out


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return added(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return added(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, partial: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.partial = dim % x.ndim, group, partial
        return gathered(x, ctx.dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        back = _summed_part if ctx.partial else part
        return back(grad, ctx.dim, ctx.group), None, None, None


class _SumAndSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim % x.ndim, group
        return _summed_part(x, ctx.dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gathered(grad, ctx.dim, ctx.group), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim % x.ndim, group
        return part(x, ctx.dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gathered(grad, ctx.dim, ctx.group), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return exchanged(x, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return exchanged(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def exchanged(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """`all_to_all` without a gradient."""
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """The same values; the gradient is multiplied by `factor`."""
    return _call(_ScaleGradient, x, factor)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None
