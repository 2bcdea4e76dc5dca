"""What linear layers and embeddings become whose weights are split (Megatron-LM, arXiv:1909.08053, section 3).

A column-parallel layer gives each rank some of the output features; a row-parallel layer takes them and adds up what
the ranks make of them. So a pair of them needs one all-reduce in the forward pass and one in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fairlead.errors import ConfigError
from fairlead_distributed.parallel._comm import (
    all_to_all,
    copy_to_ranks,
    gather_for_all,
    gather_for_parts,
    sum_and_split,
    sum_over_ranks,
)
from fairlead_distributed.parallel._local import WholeState, distribute, group_of, local, tensor_mesh

SEQUENCE = 1
"""The dimension of a sequence in activations of shape (batch, sequence, features)."""


def check_divisible(size: int, ranks: int, what: str, where: str | None = None) -> None:
    """Raises ConfigError where the ranks cannot share `size` evenly."""
    if size % ranks:
        above = -(-size // ranks) * ranks
        raise ConfigError(
            f"{size} {what} cannot be divided among {ranks} ranks",
            where=where,
            why=f"{size} is no multiple of {ranks}",
            fix=f"use {above} {what}, a number of ranks that divides {size}, or do not split this layer",
        )


def multiplies(layer: nn.Module) -> bool:
    """Whether a linear layer has a custom way to compute that also works with a part of its weight (8 bits).

    It has `multiply(input, weight, bias)`, as `F.linear` has them; `multiple` says of what the part's sizes are to be
    multiples.
    """
    return hasattr(type(layer), "multiply")


def _linear(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = layer.multiply(x, weight, bias) if multiplies(layer) else F.linear(x, weight, bias)
    return out


class _Entered:
    """The last tensor that entered column-parallel layers, so that layers with the same input share one all-reduce.

    It is held until the row-parallel layer after them.
    """

    def __init__(self) -> None:
        self.last: tuple[Tensor, tuple[object, ...], Tensor] | None = None

    def enter(self, x: Tensor, group: dist.ProcessGroup, sequence: bool) -> Tensor:
        key = (x._version, torch.is_grad_enabled(), group, sequence)
        if self.last is not None and self.last[0] is x and self.last[1] == key:
            return self.last[2]
        entered = gather_for_parts(x, SEQUENCE, group) if sequence else copy_to_ranks(x, group)
        self.last = (x, key, entered)
        return entered

    def leave(self) -> None:
        self.last = None


_entered = _Entered()


def _spread(layer: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Spreads a parameter that is not yet (one that two layers share may be)."""
    parameter = layer._parameters[name]
    if parameter is not None and not isinstance(parameter, DTensor):
        layer._parameters[name] = distribute(parameter, mesh, placement)


class Column(WholeState):
    """What a layer becomes whose output features are split. Its input is replicated, its output split.

    Attributes:
        transposed: The weight is (in, out), as in transformers' `Conv1D`.
        entering: Where the input's gradient is added up: in this layer, or in a module around it.
        gather_output: The output is gathered, and replicated.
        sequence: The input is split along the sequence, and gathered here.
        packed: Sizes of the layers that the weight's output features are made of (`q, k, v`), each to be split alone.
        loss_parallel: The output is a DTensor, split along its last dimension, as torch's `loss_parallel` takes it.
    """

    weight: Tensor
    bias: Any  # a tensor or None; torch declares a tensor
    transposed = False
    entering = True
    gather_output = False
    sequence = False
    packed: tuple[int, ...] = ()
    loss_parallel = False

    def split(self, mesh: DeviceMesh) -> None:
        """Keeps this rank's output features."""
        _spread(self, "weight", mesh, Shard(1 if self.transposed else 0))
        _spread(self, "bias", mesh, Shard(0))

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out / ranks), or (..., out) where the output is gathered."""
        group = group_of(self.weight)
        weight, bias = local(self.weight), None if self.bias is None else local(self.bias)
        weight = weight.t() if self.transposed else weight
        if group is None:
            return _linear(self, input, weight, bias)
        if input.shape[-1] != weight.shape[1]:
            raise ConfigError(
                f"a column-parallel layer of {weight.shape[1]} input features got {input.shape[-1]}",
                why="its input is not split over the ranks",
                fix="put a row-parallel layer before it, or `gather_output=True` on the column-parallel one",
            )
        if self.packed:
            weight = repack(weight, self.packed, group)
            bias = None if bias is None else repack(bias, self.packed, group)
        x = _entered.enter(input, group, self.sequence) if self.entering else input
        if self.gather_output or self.loss_parallel:
            _entered.leave()  # no row-parallel layer comes after it
        out = _linear(self, x, weight, bias)
        if self.loss_parallel:
            mesh = tensor_mesh(self.weight) if isinstance(self.weight, DTensor) else None
            return DTensor.from_local(out, mesh, [Shard(out.ndim - 1)], run_check=False)
        return gather_for_all(out, -1, group) if self.gather_output else out


class Row(WholeState):
    """What a layer becomes whose input features are split. Its input is split, its output replicated."""

    weight: Tensor
    bias: Any  # a tensor or None; torch declares a tensor
    transposed = False
    sequence = False  # the output is split along the sequence

    def split(self, mesh: DeviceMesh) -> None:
        """Keeps the weights of this rank's input features. The bias stays unsplit: it is added once, to the sum."""
        _spread(self, "weight", mesh, Shard(0 if self.transposed else 1))
        _spread(self, "bias", mesh, Replicate())

    def forward(self, input: Tensor) -> Tensor:
        """(..., in / ranks) -> (..., out)."""
        _entered.leave()
        group = group_of(self.weight)
        weight = local(self.weight).t() if self.transposed else local(self.weight)
        bias = None if self.bias is None else local(self.bias, summed=self.sequence)
        if group is None:
            return _linear(self, input, weight, bias)
        if input.shape[-1] != weight.shape[1]:
            ranks = dist.get_world_size(group)
            raise ConfigError(
                f"a row-parallel layer got {input.shape[-1]} features, and this rank has the weights of "
                f"{weight.shape[1]}",
                why=f"each of the {ranks} ranks is to bring its own 1/{ranks} of {weight.shape[1] * ranks} features",
                fix="put a column-parallel layer before it, whose output is not gathered",
            )
        out = _linear(self, input, weight)
        out = sum_and_split(out, SEQUENCE, group) if self.sequence else sum_over_ranks(out, group)
        return out if bias is None else out + bias.to(out.dtype)


class VocabularyRows(WholeState):
    """What an embedding becomes whose rows are split."""

    weight: Tensor
    num_embeddings: int
    padding_idx: int | None

    def split(self, mesh: DeviceMesh) -> None:
        """Keeps this rank's rows."""
        _spread(self, "weight", mesh, Shard(0))

    def forward(self, input: Tensor) -> Tensor:
        """(...) of int64 -> (..., embedding_dim)."""
        group, weight = group_of(self.weight), local(self.weight)
        if group is None:
            return F.embedding(input, weight, self.padding_idx)
        known = (input >= 0) & (input < self.num_embeddings) if input.device.type == "cpu" else None
        if known is not None and not known.all():
            raise IndexError(f"a token is not in the vocabulary of {self.num_embeddings}")
        rank, rows = dist.get_rank(group), weight.shape[0]
        first, padding = rank * rows, self.padding_idx
        # On a GPU, asking would wait for it: there, the first and the last rank's look-up refuses other tokens.
        absent = (input < first) if rank else torch.zeros_like(input, dtype=torch.bool)
        if rank < dist.get_world_size(group) - 1:
            absent = absent | (input >= first + rows)
        here = None if padding is None or not first <= padding < first + rows else padding - first
        out = F.embedding((input - first).masked_fill(absent, 0), weight, here)
        return sum_over_ranks(out.masked_fill(absent.unsqueeze(-1), 0), group)


def repack(rows: Tensor, packed: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """From this rank's consecutive rows of a packed weight to its part of each layer that is packed in it.

    The parameter itself stays split into consecutive rows: that is what checkpoints and `fully_shard` can describe.
    So a packed layer sends `1 / ranks` of its weight in each forward and backward pass.

    Args:
        rows: (all rows / ranks, ...).
        packed: Proportions of the layers, in their order: `(1, 1, 1)` for queries, keys and values.
        group: The ranks.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    order, sent, received = _repacking(rows.shape[0], packed, ranks, rank, rows.device)
    return all_to_all(rows.index_select(0, order), sent, received, group)


def _repacking(
    count: int, packed: tuple[int, ...], ranks: int, rank: int, device: torch.device
) -> tuple[Tensor, list[int], list[int]]:
    """Which rows to send, how many of them to each rank, and how many come from each."""
    unit = count * ranks // sum(packed)
    wanted: list[list[int]] = [[] for _ in range(ranks)]
    start = 0
    for size in packed:
        step = size * unit // ranks
        for other in range(ranks):
            wanted[other] += range(start + other * step, start + (other + 1) * step)
        start += size * unit
    # Both lists rise, so what comes from the ranks in their order is in the order that is wanted.
    own = [[row - rank * count for row in rows if row // count == rank] for rows in wanted]
    order = torch.tensor([row for rows in own for row in rows], device=device)
    return order, [len(rows) for rows in own], [sum(row // count == r for row in wanted[rank]) for r in range(ranks)]
