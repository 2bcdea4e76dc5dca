"""Context parallelism: each rank has a part of every sequence, and attention sees all of it.

Everything but attention works on each token alone, so a model needs no other change than its attention and the
positions that it gives its tokens. Both are taken over inside the module's forward.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map

from fairlead.errors import ConfigError
from fairlead_distributed.parallel._comm import added
from fairlead_distributed.parallel._context import (
    ContextParallel,
    Layout,
    Method,
    current,
    gather_sequence,
    own_tokens,
    split_sequence,
)
from fairlead_distributed.parallel._local import derived

__all__ = [
    "ContextParallel",
    "average_gradients",
    "mean_over_tokens",
    "parallelize_context",
    "positions",
    "shard_sequence",
]

METHODS = ("allgather", "ulysses")
T = TypeVar("T")


def parallelize_context(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    method: Method = "allgather",
    balance: bool = True,
    split_inputs: bool = True,
    stage: tuple[bool, bool] | None = None,
) -> ContextParallel:
    """Lets the ranks of a mesh share each sequence that a module is called with, in place.

    The module is called with full sequences on every rank, and returns full ones: each rank's forward works on its
    own tokens only, and the loss can be computed as before, with a mean over all tokens. All ranks of the mesh are to
    get the same batch. **Gradients are to be averaged over the ranks**, as `DistributedDataParallel`, `fully_shard`
    and `average_gradients` do it.

    Inside the module, `torch.nn.functional.scaled_dot_product_attention` sees all tokens, and positions are those in
    the full sequence, where the module takes them from `positions(length)`, from `torch.arange(length)` or from the
    first `length` rows of one of its parameters or buffers.

    Args:
        module: A module whose inputs and outputs are (batch, sequence, ...).
        mesh: The ranks, in one dimension.
        method: "allgather" gathers keys and values (Llama 3, arXiv:2407.21783, section 3.3.2); "ulysses" gives each
            rank some of the heads of the full sequence (arXiv:2309.14509), whose number it must divide.
        balance: Divide the sequence into head and tail parts, for a causal mask. Without it, each rank has consecutive
            tokens.
        split_inputs: False for a module that is called with `shard_sequence`'s parts; its outputs are then parts too,
            and `mean_over_tokens` makes the loss.
        stage: For a stage of a pipeline, whether it is the first and whether it is the last: the first is called with
            full sequences, the last returns full ones, and parts go from one to the next. Whether any of them has
            attention is not checked here; `calls` of what is returned says it.

    Raises:
        ConfigError: The mesh has several dimensions, or the method is not known. In forward: the length cannot be
            divided evenly; attention has a custom mask, is computed by hand, or does not happen; a result is not
            made of tokens.

    Example:
        >>> parallelize_context(model, mesh["context"])  # doctest: +SKIP
        >>> loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())  # doctest: +SKIP
    """
    if mesh.ndim != 1:
        raise ConfigError(
            f"a mesh of {mesh.ndim} dimensions {mesh.mesh_dim_names}",
            why="context parallelism takes one of them",
            fix='pass one dimension: mesh["context"]',
        )
    if method not in METHODS:
        raise ConfigError(f"{method!r} is no method of context parallelism", fix=f"one of {', '.join(METHODS)}")
    first, last = stage or (split_inputs, split_inputs)
    context = ContextParallel(mesh, method, balance, first, last, stage is not None)
    if mesh.size() == 1:
        return context
    for one in module.modules():
        # Not only the outermost: activation checkpointing calls inner modules in the backward pass, too.
        inner = one is not module and not type(one).__module__.startswith("torch.nn.modules.")
        if inner or one is module or isinstance(one, nn.MultiheadAttention):
            one.__dict__["_context_parallel"] = context
            one.__class__ = derived(type(one), _Outermost if one is module else _Inside)
    return context


class _Inside(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.__dict__["_context_parallel"].active():
            return super().forward(*args, **kwargs)


class _Outermost(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        context: ContextParallel = self.__dict__["_context_parallel"]
        group, layout = context.group, context.layout
        before, length = context.calls, _length((args, kwargs))
        if context.split_inputs:
            if kwargs.get("labels") is not None:
                raise ConfigError(
                    "a loss inside the module would see this rank's tokens only",
                    where=f"{type(self).__name__}(labels=...)",
                    fix="call the module without labels and compute the loss of its logits",
                )

            def split(x: Any) -> Any:
                return split_sequence(x, 1, layout, group) if _has(x, length) else x

            args, kwargs = tree_map(split, (args, kwargs))
            length //= layout.ranks
        context.begin(self, length)
        try:
            with context.active():
                out = super().forward(*args, **kwargs)
        except IndexError as error:
            if "torch.arange" in context.positions:
                error.add_note(
                    f"Context parallelism answers torch.arange({length}) with these tokens' positions in the whole "
                    "sequence, and an index like that may be meant otherwise. With Hugging Face, pass an "
                    "attention_mask of ones (without it, positions that do not rise by one are taken for packed "
                    "sequences), or use balance=False."
                )
            raise
        if context.calls == before and not context.stage:
            raise ConfigError(
                f"context parallelism did nothing in {type(self).__name__}: no attention came by",
                why="it takes over torch.nn.functional.scaled_dot_product_attention, which was not called",
                fix="use that function for attention (Hugging Face: attn_implementation='sdpa'), or leave it out",
            )
        if not context.gather_outputs:
            return out

        def gather(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if _has(x, length):
                return gather_sequence(x, 1, layout, group)
            if x.is_floating_point():
                raise ConfigError(
                    f"{type(self).__name__} returned a tensor of shape {tuple(x.shape)}, which is not made of tokens",
                    why=f"it was made of this rank's {length} tokens of each sequence only",
                    fix="return (batch, sequence, ...), and make losses and means outside of the module; or "
                    "`split_inputs=False` with `shard_sequence` and `mean_over_tokens`",
                )
            return x

        return tree_map(gather, out)


def _length(inputs: Any) -> int:
    """Tokens in each sequence of what a module was called with: dimension 1 of the first tensor that has one."""
    found = next((x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.ndim >= 2), None)
    if found is None:
        raise ConfigError(
            "a module with context parallelism was called without a tensor of shape (batch, sequence, ...)",
            fix="call it with one, or parallelize the module that is",
        )
    return found.shape[1]


def _has(x: Any, length: int) -> bool:
    return isinstance(x, Tensor) and x.ndim >= 2 and x.shape[1] == length


def positions(length: int, device: torch.device | str | None = None) -> Tensor:
    """The positions, in the full sequence, of the `length` tokens that a module has here: (length,) of int64.

    In a module without context parallelism, `torch.arange(length)`.

    Example:
        >>> positions(3)
        tensor([0, 1, 2])
    """
    context = current.get()
    if context is None:
        return torch.arange(length, device=device)
    context.positions.add("positions()")
    return own_tokens(context.layout, length, torch.device(device or "cpu"))


def shard_sequence(batch: T, mesh: DeviceMesh, dim: int = 1, *, balance: bool = True) -> T:
    """This rank's tokens of a batch: of each tensor in it that is as long as the first one, along `dim`.

    Targets must be shifted before: the token after a part's last is on another rank.

    Raises:
        ConfigError: The length is no multiple of twice the ranks (of the ranks, without `balance`).
    """
    layout = Layout(mesh.size(), mesh.get_local_rank(), balance)
    leaves = [x for x in tree_leaves(batch) if isinstance(x, Tensor) and x.ndim > dim]
    if not leaves:
        raise ConfigError(f"the batch has no tensor with a dimension {dim}", where="shard_sequence")
    length = leaves[0].shape[dim]

    def own(x: Any) -> Any:
        long = isinstance(x, Tensor) and x.ndim > dim and x.shape[dim] == length
        return layout.own(x, dim) if long else x

    sharded: T = tree_map(own, batch)
    return sharded


def mean_over_tokens(losses: Tensor, counted: Tensor | None, mesh: DeviceMesh) -> Tensor:
    """The mean over all tokens of all ranks, of losses for each token of this rank.

    The ranks' numbers of tokens that count may differ. The gradient is this rank's part of the mean's, times the
    number of ranks: right once it is averaged over them.

    Args:
        losses: Of each token (`cross_entropy(..., reduction="none")`), any shape.
        counted: Which tokens count (`targets != ignore_index`), of the same shape; None for all.
        mesh: The ranks that share the sequences.

    Returns:
        A scalar, the same on all ranks; NaN where no token counts, as torch has it.
    """
    group = mesh.get_group()
    mask = torch.ones_like(losses, dtype=torch.bool) if counted is None else counted
    count = added(mask.sum().to(losses.dtype), group)
    own = losses.masked_fill(~mask, 0).sum() / count
    total = added(own.detach(), group)
    # The value is the mean over all ranks; the gradient is that of this rank's part.
    return total + (own - own.detach()) * mesh.size()


def average_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Averages the gradients of all parameters over the ranks of a mesh, where nothing else does.

    Call it after the backward pass, on all ranks. Not with `DistributedDataParallel` or `fully_shard` over the mesh.
    """
    for parameter in module.parameters():
        if parameter.grad is not None:
            grad: Any = parameter.grad
            dist.all_reduce(getattr(grad, "_local_tensor", grad).div_(mesh.size()), group=mesh.get_group())
