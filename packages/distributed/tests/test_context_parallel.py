"""Sequences that ranks share, against the same model in one process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from examples.gpt.model import GPT
from fairlead.errors import ConfigError
from fairlead_distributed.parallel.context import (
    ContextParallel,
    average_gradients,
    mean_over_tokens,
    parallelize_context,
    positions,
    shard_sequence,
)
from fairlead_distributed.parallel.tensor import parallelize_tensor
from fairlead_distributed.testing import run_ranks
from integration_tests.models import GPT2, Encoder, Llama, sample_tokens, token_loss
from integration_tests.split_models import Compared, compare

TOKENS = 16  # a multiple of twice four ranks


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))


class Attention(nn.Module):
    """Attention alone, of queries, keys and values that are parameters: their gradients are seen as they are."""

    def __init__(self, kv_heads: int, is_causal: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.is_causal, self.gqa = is_causal, kv_heads < 4

        def drawn(heads: int, size: int) -> Tensor:
            return torch.randn(2, TOKENS, heads, size, generator=generator, dtype=torch.float64)

        self.q, self.k, self.v = drawn(4, 6), drawn(kv_heads, 6), drawn(kv_heads, 5)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, scale=0.3, enable_gqa=self.gqa)
        return out.transpose(1, 2)


def attended(kv_heads: int, is_causal: bool, method: Any, balance: bool) -> float:
    """The largest difference in the output, dQ, dK and dV."""
    reference = Attention(kv_heads, is_causal)
    ours = copy.deepcopy(reference)
    context = parallelize_context(ours, mesh(), method=method, balance=balance)
    weight = torch.randn(2, TOKENS, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found: list[list[Any]] = []
    for module in (reference, ours):
        qkv = [x.clone().requires_grad_() for x in (module.q, module.k, module.v)]
        out = module(*qkv)
        (out * weight).sum().backward()
        found.append([out.detach(), *(x.grad for x in qkv)])
    assert context.calls == 1
    assert all(float(x.abs().max()) > 0.1 for x in found[0])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def attentions(rank: int) -> dict[str, float]:
    found = {}
    for kv_heads, is_causal, balance in itertools.product((4, 2, 1), (True, False), (True, False)):
        title = f"{kv_heads}, causal {is_causal}, balanced {balance}"
        found[f"allgather, {title}"] = attended(kv_heads, is_causal, "allgather", balance)
        if kv_heads % dist.get_world_size() == 0:
            found[f"ulysses, {title}"] = attended(kv_heads, is_causal, "ulysses", balance)
    return found


@pytest.mark.parametrize(("ranks", "cases"), [(2, 20), (4, 16)])
def test_attention_equals_that_of_one_process(ranks: int, cases: int) -> None:
    for found in run_ranks(attentions, ranks):
        assert len(found) == cases
        assert max(found.values()) < 1e-12, found


class CheckpointedBlocks(Llama):
    """Checkpoints what it calls, and not what its blocks call."""

    def forward(self, tokens: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(tokens.shape[1]), self.frequency).repeat(1, 2)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, angle.cos(), angle.sin(), True, use_reentrant=False)
        out: Tensor = self.lm_head(self.norm(x))
        return out


class Explicit(Llama):
    """Takes positions by `positions(length)`."""

    def forward(self, tokens: Tensor) -> Tensor:
        angle = torch.outer(positions(tokens.shape[1]), self.frequency).repeat(1, 2)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, angle.cos(), angle.sin(), False)
        out: Tensor = self.lm_head(self.norm(x))
        return out


class CausalEncoder(Encoder):
    """torch.nn's encoder with a causal mask that torch may drop, since it is said to be one."""

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embedding(tokens) + self.position[:, :length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
        out: Tensor = self.out(self.encoder(x, mask=mask, is_causal=True))
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "Llama": (Llama, "torch.arange"),
    "Llama, all to all": (partial(Llama, is_causal=False), "torch.arange"),
    "GPT-2": (GPT2, "torch.arange"),
    "the example": (partial(GPT, layers=2, width=32, heads=4, context=TOKENS), "a slice of a table"),
    "torch.nn": (Encoder, "a slice of a table"),
    "torch.nn, causal": (CausalEncoder, "a slice of a table"),
    "checkpointed": (CheckpointedBlocks, "torch.arange"),
    "positions()": (Explicit, "positions()"),
}


def begin(method: Any, contexts: list[ContextParallel], model: nn.Module) -> None:
    contexts.append(parallelize_context(model, mesh(), method=method))


def models(rank: int, titles: list[str]) -> dict[str, tuple[Compared, set[str], int]]:
    found = {}
    for title, method in itertools.product(titles, ("allgather", "ulysses")):
        torch.manual_seed(0)
        model = MODELS[title][0]().double()
        contexts: list[ContextParallel] = []
        result = compare(
            model,
            partial(begin, method, contexts),
            lambda model: token_loss(model, sample_tokens(length=TOKENS + 1)),
            after_backward=lambda model: average_gradients(model, mesh()),
        )
        found[f"{title}, {method}"] = result, contexts[0].positions, contexts[0].calls
    return found


@pytest.fixture(scope="module")
def trained() -> dict[str, tuple[Compared, set[str], int]]:
    by_rank = run_ranks(models, 2, list(MODELS), timeout=200)
    for one in by_rank[1].values():
        one[0].check()
    return by_rank[0]


@pytest.mark.full
@pytest.mark.parametrize("method", ["allgather", "ulysses"])
@pytest.mark.parametrize("title", MODELS)
def test_a_model_equals_one_process(trained: dict[str, Any], title: str, method: str) -> None:
    result, where, calls = trained[f"{title}, {method}"]
    result.check()
    assert where == {MODELS[title][1]}
    # Two blocks in two steps; computed again where they are checkpointed.
    assert calls == (8 if title == "checkpointed" else 4)


@pytest.mark.full
def test_four_ranks_equal_one_process() -> None:
    for found in run_ranks(models, 4, ["Llama", "the example"], timeout=200):
        assert len(found) == 4
        for result, _, _ in found.values():
            result.check()


def sharded(rank: int) -> Compared:
    """Parts of a batch, the model's outputs in parts, and a mean over tokens that do not count on one rank."""
    torch.manual_seed(0)
    both = mesh()

    def loss(model: nn.Module) -> Tensor:
        tokens = sample_tokens(length=TOKENS + 1)
        if "_context_parallel" not in model.__dict__:
            return token_loss(model, tokens)
        batch = shard_sequence({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, both)
        logits, targets = model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten()
        assert len(targets) == 3 * TOKENS // dist.get_world_size()
        each = F.cross_entropy(logits, targets, reduction="none", ignore_index=0)
        return mean_over_tokens(each, targets != 0, both)

    return compare(
        Llama().double(),
        lambda model: parallelize_context(model, both, split_inputs=False),
        loss,
        after_backward=lambda model: average_gradients(model, both),
    )


def with_tensor_parallel(rank: int) -> Compared:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tensor"))

    def split(model: nn.Module) -> None:
        parallelize_tensor(model, both["tensor"], "auto")
        parallelize_context(model, both["context"])

    torch.manual_seed(0)
    return compare(
        Encoder().double(),
        split,
        lambda model: token_loss(model, sample_tokens(length=TOKENS + 1)),
        after_backward=lambda model: average_gradients(model, both["context"]),
    )


def test_a_batch_in_parts_has_the_mean_over_all_tokens() -> None:
    for found in run_ranks(sharded, 2):
        found.check()


def test_tensor_parallel_goes_below() -> None:
    for found in run_ranks(with_tensor_parallel, 4):
        found.check()


class ByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


class Pooled(Attention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = x.view(*x.shape[:-1], 4, -1).transpose(1, 2)
        return F.scaled_dot_product_attention(y, y, y).mean((1, 2, 3))


@dataclass
class Using(nn.Module):
    """A module whose forward is a function."""

    call: Callable[..., Tensor]

    def __post_init__(self) -> None:
        super().__init__()

    __hash__ = nn.Module.__hash__

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.call(x, **kwargs)


def attend(x: Tensor, **kwargs: Any) -> Tensor:
    y = x.view(*x.shape[:-1], 4, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(y, y, y, **kwargs).transpose(1, 2).flatten(2)


def three_heads(x: Tensor) -> Tensor:
    y = x.view(*x.shape[:-1], 3, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(y, y, y)


def refusals(rank: int) -> dict[str, str]:
    x = torch.randn(2, 8, 12)
    table, other = nn.Parameter(torch.zeros(6, 12)), torch.zeros(2, 1, 9, 12)

    def refused(
        module: nn.Module, *args: Any, method: Any = "allgather", whole: nn.Module | None = None, **kwargs: Any
    ) -> str:
        def use() -> None:
            parallelize_context(whole or module, mesh(), method=method)
            module(*args, **kwargs)

        with pytest.raises(ConfigError) as caught:
            use()
        return str(caught.value)

    short = Using(lambda x: attend(x + table[: x.shape[1]]))
    short.register_parameter("table", table)
    weights = Using(lambda x: nn.MultiheadAttention(12, 2, batch_first=True)(x, x, x)[0])
    convolved = Using(lambda x: attend(F.conv1d(x.mT, torch.zeros(12, 12, 3), padding=1).mT))
    return {
        "by hand": refused(ByHand(), x),
        "never": refused(Using(torch.relu), x),
        "mask": refused(Using(attend), x, attn_mask=torch.ones(4, 4, dtype=torch.bool)),
        "pooled": refused(Pooled(4, False), x),
        "length": refused(Using(attend), x[:, :6]),
        "method": refused(Using(attend), x, method="nothing"),
        "ulysses": refused(
            Using(three_heads),
            x,
            method="ulysses",
        ),
        "cross": refused(Using(lambda x: F.scaled_dot_product_attention(x[:, None], other, other)), x),
        "labels": refused(Using(lambda x, labels: attend(x)), x, labels=x),
        "table": refused(short, x),
        "weights": refused(weights, x),
        "along": refused(convolved, x),
        "by hand, by keyword": refused(Using(lambda x: torch.softmax(input=x @ x.mT, dim=-1) @ x), x),
        "along, by keyword": refused(Using(lambda x: attend(torch.cumsum(input=x, dim=1))), x),
        "no tokens": refused(Using(attend), torch.ones(3)),
        "a part": refused(part := Using(attend), x, whole=nn.Sequential(part)),
    }


@pytest.fixture(scope="module")
def refused() -> dict[str, str]:
    return run_ranks(refusals, 2)[0]


@pytest.mark.parametrize(
    ("what", "said"),
    {
        "by hand": ["attention is computed by hand, over this rank's 4 tokens only", "attn_implementation='sdpa'"],
        "never": ["context parallelism did nothing in Using", "no attention came by"],
        "mask": ["attention has a mask of shape (4, 4)", "is_causal=True"],
        "pooled": ["Pooled returned a tensor of shape (2,), which is not made of tokens"],
        "length": ["sequences of 6 tokens cannot be divided evenly among 2 ranks", "multiple of 4"],
        "method": ["'nothing' is no method of context parallelism", "allgather, ulysses"],
        "ulysses": ["3 heads of queries cannot be divided among 2 ranks", "method: allgather"],
        "cross": ["is not that of a sequence to itself"],
        "labels": ["a loss inside the module would see this rank's tokens only"],
        "table": ["a table of 6 rows has no positions for sequences of 8 tokens"],
        "weights": ["torch.nn.MultiheadAttention must return its attention weights", "need_weights=False"],
        "along": ["conv1d works along the sequence, and this rank has 4 tokens of it"],
        "by hand, by keyword": ["attention is computed by hand"],
        "along, by keyword": ["cumsum works along the sequence"],
        "a part": ["a part of the module was called, and the module itself not", "call `self(...)`"],
        "no tokens": ["called without a tensor of shape (batch, sequence, ...)"],
    }.items(),
)
def test_what_would_be_wrong_is_refused(refused: dict[str, str], what: str, said: list[str]) -> None:
    for text in said:
        assert text in refused[what]


def divided(rank: int) -> tuple[list[int], list[int]]:
    batch = torch.arange(8).repeat(1, 1)
    given: dict[str, Any] = {"ids": batch, "name": "x"}
    whole = shard_sequence(given, mesh())
    return whole["ids"][0].tolist(), shard_sequence(batch, mesh(), balance=False)[0].tolist()


def test_each_rank_has_a_part_of_the_head_and_of_the_tail() -> None:
    assert run_ranks(divided, 2) == [([0, 1, 6, 7], [0, 1, 2, 3]), ([2, 3, 4, 5], [4, 5, 6, 7])]


def test_positions_without_context_parallelism() -> None:
    assert positions(4).tolist() == [0, 1, 2, 3]
