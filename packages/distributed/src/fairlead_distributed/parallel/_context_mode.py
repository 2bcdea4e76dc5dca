"""What is taken over in a module that has a part of each sequence: attention, positions, and what would be wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from fairlead.errors import ConfigError
from fairlead_distributed.parallel._attention import attention
from fairlead_distributed.parallel._sequence import Layout, own_tokens

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
        split_inputs: The module is called with whole sequences.
        gather_outputs: It returns whole sequences.
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
        """The positions of this rank's tokens in the whole sequence."""
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
    """Sees every torch function that is called, and answers some of them for the whole sequence."""

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
        if func in _SOFTMAX and args[0].ndim >= 3 and args[0].shape[-2:] == (context.length, context.length):
            raise ConfigError(
                f"attention is computed by hand, over this rank's {context.length} tokens only",
                why="there is a softmax over their scores, outside of scaled_dot_product_attention",
                fix="use torch.nn.functional.scaled_dot_product_attention (Hugging Face: attn_implementation='sdpa')",
            )
        if func in _ALONG and _works_along(func, context.length, args, kwargs):
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
                "torch.nn.MultiheadAttention is asked for its weights",
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


def _works_along(func: Any, length: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    x: Tensor = args[0]
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
