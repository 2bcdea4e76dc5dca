"""How the tokens of a sequence are divided among ranks, and what is taken over in a module that has a part of each
sequence: attention to the keys and values of all tokens, positions, and what would be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention  # as it is: torch's name for it is replaced
from torch.overrides import TorchFunctionMode

from fairlead.errors import ConfigError
from fairlead_distributed.parallel._comm import all_to_all, gather_for_parts, gathered


class Context(Protocol):
    """What attention has to know of the ranks that share a sequence."""

    length: int

    @property
    def method(self) -> str: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def group(self) -> dist.ProcessGroup: ...


def attention(
    context: Context,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As `scaled_dot_product_attention`, of (batch, heads, own tokens, features), over the full sequence."""
    where = "scaled_dot_product_attention with context parallelism"
    tokens = query.shape[-2]
    if not context.length:
        raise ConfigError(
            "a part of the module was called, and the module itself not",
            where=where,
            why="a call of the module divides the sequences among the ranks",
            fix="call `self(...)` in the step, and not `self.model(...)`",
        )
    if attn_mask is not None:
        raise ConfigError(
            f"attention has a mask of shape {tuple(attn_mask.shape)}",
            where=where,
            why="it was made for this rank's tokens only",
            fix="use is_causal=True or no mask; with Hugging Face, leave attention_mask out (a batch without padding)",
        )
    if query.ndim != 4 or key.shape[-2] != tokens or tokens != context.length:
        raise ConfigError(
            f"attention of {tuple(query.shape)} to {tuple(key.shape)} is not that of a sequence to itself",
            where=where,
            why=f"this rank has {context.length} tokens of each sequence, and attention is to be "
            "(batch, heads, tokens, features)",
            fix="leave modules with cross-attention, windows or a cache of keys out of context parallelism",
        )
    if context.method == "ulysses":
        return _ulysses(context, query, key, value, dropout_p, is_causal, scale, enable_gqa)
    group, layout = context.group, context.layout
    keys, values = _gathered(key, value, layout, group)
    if not is_causal:
        return scaled_dot_product_attention(
            query, keys, values, None, dropout_p, False, scale=scale, enable_gqa=enable_gqa
        )
    chunks = layout.chunks(layout.rank)
    size = tokens // len(chunks)
    outs = []
    for part, number in zip(query.chunk(len(chunks), -2), chunks, strict=True):
        seen = (number + 1) * size
        seen_keys, seen_values = keys[..., :seen, :], values[..., :seen, :]
        # The last query sees all of these keys, each one before it one less. torch's flag is for as many as queries.
        first = number == 0
        mask = None if first else torch.ones(size, seen, dtype=torch.bool, device=query.device).tril(seen - size)
        outs.append(
            scaled_dot_product_attention(
                part, seen_keys, seen_values, mask, dropout_p, first, scale=scale, enable_gqa=enable_gqa
            )
        )
    return torch.cat(outs, -2)


def _gathered(key: Tensor, value: Tensor, layout: Layout, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Keys and values of the full sequence, in its order; in one collective."""
    both = layout.in_order(gather_for_parts(torch.cat((key, value), -1), -2, group), -2)
    return both[..., : key.shape[-1]], both[..., key.shape[-1] :]


def _ulysses(
    context: Context,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    group, layout = context.group, context.layout
    for x, what in ((query, "heads of queries"), (key, "heads of keys"), (value, "heads of values")):
        if x.shape[1] % layout.ranks:
            raise ConfigError(
                f"{x.shape[1]} {what} cannot be divided among {layout.ranks} ranks",
                where="context parallelism, method: ulysses",
                why="each rank takes some of the heads of the full sequence",
                fix="use method: allgather, or a number of ranks that divides the heads",
            )
    # A query's heads and the keys that they share go to the same rank, since all are divided in their order.
    query, key, value = (_to_heads(x, layout, group) for x in (query, key, value))
    out = scaled_dot_product_attention(
        query, key, value, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return _to_tokens(out, layout, group)


def _to_heads(x: Tensor, layout: Layout, group: dist.ProcessGroup) -> Tensor:
    """(batch, heads, own tokens, d) -> (batch, heads / ranks, tokens, d)."""
    ones = [1] * layout.ranks
    sent = torch.stack(x.chunk(layout.ranks, 1))
    received = all_to_all(sent, ones, ones, group)
    return layout.in_order(torch.cat(received.unbind(), -2), -2)


def _to_tokens(x: Tensor, layout: Layout, group: dist.ProcessGroup) -> Tensor:
    """(batch, heads / ranks, tokens, d) -> (batch, heads, own tokens, d)."""
    ones = [1] * layout.ranks
    sent = torch.stack(layout.by_rank(x, -2).chunk(layout.ranks, -2))
    received = all_to_all(sent, ones, ones, group)
    return torch.cat(received.unbind(), 1)


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
        """This rank's chunks of a full tensor."""
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
        """The full sequence, of what the ranks have, one rank's after the other's."""
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
    """The positions of a rank's `length` tokens in the full sequence."""
    # Not intercepted: this is what an intercepted `arange` is answered with.
    with torch._C.DisableTorchFunction():  # type: ignore[attr-defined, unused-ignore]
        return layout.own(torch.arange(length * layout.ranks, device=device), 0)


def split_sequence(x: Tensor, dim: int, layout: Layout, group: dist.ProcessGroup) -> Tensor:
    """Whole in, this rank's tokens out. The gradient is gathered, and divided as averaged gradients are."""
    out: Tensor = _Split.apply(x, dim, layout, group)  # type: ignore[no-untyped-call]
    return out


def gather_sequence(x: Tensor, dim: int, layout: Layout, group: dist.ProcessGroup) -> Tensor:
    """This rank's tokens in, the full sequence out, for ranks that all do the same with it.

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


Method = Literal["allgather", "ulysses"]

current: ContextVar[ContextParallel | None] = ContextVar("context_parallel", default=None)
"""The context parallelism of the module that is running."""


@dataclass(eq=False)
class ContextParallel:
    """What a module was given, and what has been seen of it since.

    Attributes:
        mesh: The ranks that share each sequence.
        method: How attention sees the other ranks' tokens.
        balance: Each rank has a part of the head and a part of the tail of the sequence (head-tail, zigzag), so that
            all have the same work under a causal mask.
        split_inputs: The module is called with full sequences.
        gather_outputs: It returns full sequences.
        stage: It is a stage of a pipeline, which need not have attention.
        calls: How many attentions were computed over all ranks.
        positions: Where the module took positions from: `positions()`, `torch.arange`, a slice of a table.
        length: Tokens of each sequence that this rank had, when the module was last called.
    """

    mesh: DeviceMesh
    method: Method
    balance: bool
    split_inputs: bool
    gather_outputs: bool
    stage: bool = False
    calls: int = 0
    positions: set[str] = field(default_factory=set)
    length: int = 0
    _tables: set[int] = field(default_factory=set)

    @property
    def layout(self) -> Layout:
        """How the tokens are divided."""
        return Layout(self.mesh.size(), self.mesh.get_local_rank(), self.balance)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share each sequence."""
        return self.mesh.get_group()

    def begin(self, module: nn.Module, length: int) -> None:
        """Notes what a module's call is about: `length` tokens of each sequence on this rank."""
        self.length = length
        tables = [*module.parameters(), *module.buffers()]
        self._tables = {_storage(x) for x in tables if x.ndim and max(x.shape) >= length} - {0}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Takes over attention and positions, for the code inside."""
        if current.get() is self:
            yield
            return
        token = current.set(self)
        try:
            with _Mode(self):
                yield
        finally:
            current.reset(token)

    def own_positions(self, device: torch.device | str | None) -> Tensor:
        """The positions of this rank's tokens in the full sequence."""
        return own_tokens(self.layout, self.length, torch.device(device or torch.get_default_device()))

    def is_table(self, x: object) -> bool:
        """Whether it is a parameter or buffer of the module."""
        return isinstance(x, Tensor) and not isinstance(x, DTensor) and _storage(x) in self._tables


def _storage(x: Tensor) -> int:
    x = getattr(x, "_local_tensor", x)
    return 0 if x.is_meta else x.untyped_storage().data_ptr()


_SOFTMAX = {torch.softmax, Tensor.softmax, F.softmax}
_ALONG = {torch.conv1d, F.conv1d, torch.cumsum, Tensor.cumsum, torch.cumprod, Tensor.cumprod}


class _Mode(TorchFunctionMode):
    """Sees every torch function that is called, and answers some of them for the full sequence."""

    def __init__(self, context: ContextParallel) -> None:
        super().__init__()
        self.context = context

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, context = kwargs or {}, self.context
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._multi_head(*args, **kwargs)
        if func is torch.arange and _counts_to(context.length, args, kwargs):
            context.positions.add("torch.arange")
            return context.own_positions(kwargs.get("device")).to(kwargs.get("dtype") or torch.int64)
        if func is Tensor.__getitem__ and context.is_table(args[0]):
            return _rows(context, *args)
        x = args[0] if args else kwargs.get("input")
        if func in _SOFTMAX and x.ndim >= 3 and x.shape[-2:] == (context.length, context.length):
            raise ConfigError(
                f"attention is computed by hand, over this rank's {context.length} tokens only",
                why="there is a softmax over their scores, outside of scaled_dot_product_attention",
                fix="use torch.nn.functional.scaled_dot_product_attention (Hugging Face: attn_implementation='sdpa')",
            )
        if func in _ALONG and _works_along(func, context.length, x, args, kwargs):
            raise ConfigError(
                f"{func.__name__} works along the sequence, and this rank has {context.length} tokens of it",
                fix="leave modules that mix tokens in other ways than attention out of context parallelism",
            )
        return func(*args, **kwargs)

    def _attention(self, *args: Any, **kwargs: Any) -> Tensor:
        self.context.calls += 1
        return attention(self.context, *args, **kwargs)

    def _multi_head(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("need_weights", True):
            raise ConfigError(
                "torch.nn.MultiheadAttention must return its attention weights",
                why="it then computes attention by hand, over this rank's tokens only",
                fix="call it with need_weights=False",
            )
        # The function's own calls are not seen here. The context is of this thread; the function is looked up in its
        # module.
        with patch.object(F, "scaled_dot_product_attention", self._attention):
            return F.multi_head_attention_forward(*args, **kwargs)


def _counts_to(length: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of `arange` make 0, 1, ..., length - 1."""
    names = ("end",) if len(args) == 1 else ("start", "end", "step")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if set(given) - {"start", "end", "step", "device", "dtype"} or not length:
        return False
    numbers = given.get("start", 0), given.get("end"), given.get("step", 1)
    return all(type(one) is int for one in numbers) and numbers == (0, length, 1)


def _works_along(func: Any, length: int, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func in (torch.conv1d, F.conv1d):
        weight: Tensor = args[1] if len(args) > 1 else kwargs["weight"]
        return x.shape[-1] == length and weight.shape[-1] > 1
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return x.is_floating_point() and x.ndim >= 2 and x.shape[dim] == length and dim % x.ndim == 1


def _rows(context: ContextParallel, table: Tensor, index: Any) -> Tensor:
    """`table[:length]`, along any dimension, for the positions of this rank's tokens."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(part is None or part is Ellipsis or isinstance(part, slice | int) for part in parts):
        return table[index]
    for at, part in enumerate(parts):
        before, after = parts[:at], parts[at + 1 :]
        if not isinstance(part, slice) or part.stop != context.length:
            continue
        if part.start not in (None, 0) or part.step not in (None, 1):
            continue
        if Ellipsis in before:
            dim = table.ndim - 1 - sum(one is not None for one in after)
        else:
            dim = sum(one is not None for one in before)
        tokens = context.length * context.layout.ranks
        if table.shape[dim] <= context.length:
            continue  # all of it: no table of positions
        if table.shape[dim] < tokens:
            raise ConfigError(
                f"a table of {table.shape[dim]} rows has no positions for sequences of {tokens} tokens",
                why=f"the module takes its first {context.length} rows, which is this rank's number of tokens",
                fix=f"make it {tokens} rows, use shorter sequences, or take rows by `positions(length)`",
            )
        context.positions.add("a slice of a table")
        parts[at] = slice(None)
        # An index with an integer drops dimensions before this one: so first this one.
        return table.index_select(dim, context.own_positions(table.device))[tuple(parts)]
    return table[index]
