"""Attention of this rank's queries to the keys and values of all ranks' tokens."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention  # as it is: its place in torch is taken over

from fairlead.errors import ConfigError
from fairlead_distributed.parallel._comm import all_to_all, gather_for_parts
from fairlead_distributed.parallel._sequence import Layout


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
    """As `scaled_dot_product_attention`, of (batch, heads, own tokens, features), over the whole sequence."""
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
    """Keys and values of the whole sequence, in its order; in one collective."""
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
