from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fairlead.errors import ConfigError
from fairlead_distributed import (
    AdvancedFSDPManager,
    SelectiveGradientCheckpointing,
    activation_checkpointing,
    checkpoint_scope,
    memory_pool_scope,
)
from fairlead_distributed._sharded import local_part
from fairlead_distributed.activation_checkpointing import is_checkpointed
from fairlead_distributed.full_state import full_parameters
from fairlead_distributed.testing import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.dropout = nn.Dropout(0.2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = x + self.down(self.dropout(nn.functional.gelu(self.up(x))))
        return out


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(8)])


def step(model: nn.Module, *, scope: Any = contextlib.nullcontext, backward_inside: bool = True) -> tuple[int, Any]:
    """The peak of a step, in bytes, and its gradients."""
    torch.manual_seed(1)
    x = torch.randn(128, 16)
    with memory_pool_scope("cpu") as pool:
        with scope():
            loss = model(x).square().sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
    return pool.peak, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def calls(model: nn.Module) -> list[int]:
    return [layer.calls for layer in model.modules() if isinstance(layer, Block)]


def test_a_share_of_the_layers_is_checkpointed_evenly_and_saves_memory() -> None:
    """The same bits, and a peak that falls with the share; `benchmarks/activation_memory.py` has it at full size."""
    most, expected = step(network())
    assert all(bool(gradient.any()) for gradient in expected)
    peaks = []
    for ratio, layers in ((0.0, ""), (0.25, "37"), (0.5, "1357"), (1.0, "01234567")):
        model = network()
        made = SelectiveGradientCheckpointing(model, checkpoint_ratio=ratio)
        assert "".join(made.layers) == layers
        peak, found = step(model)
        assert all(map(torch.equal, found, expected))
        assert sum(calls(model)) == 8 + len(layers)
        peaks.append(peak)
        made.remove()
        assert not any(map(is_checkpointed, model.modules()))
    assert peaks[0] == most
    assert most > peaks[1] > peaks[2] > 2 * peaks[3]


@pytest.mark.parametrize("backward_inside", [True, False])
def test_a_scope_recomputes_the_layers_of_what_is_called_in_it(backward_inside: bool) -> None:
    """Also through a model around them, and with a layer that is called alone; afterwards all is as it was."""
    most, expected = step(network())
    model = network()
    peak, found = step(
        nn.ModuleDict({"model": model})["model"], scope=checkpoint_scope, backward_inside=backward_inside
    )
    assert all(map(torch.equal, found, expected))
    assert calls(model) == [2] * 8
    assert peak < most / 2
    assert not any(map(is_checkpointed, model.modules()))
    with activation_checkpointing.checkpoint_scope():
        model[0](torch.ones(2, 16)).sum().backward()
    model[0](torch.ones(2, 16)).sum().backward()
    assert calls(model)[0] == 2 + 2 + 1


def test_a_scope_is_for_its_thread_and_ends_with_an_error() -> None:
    model, other = network(), network()

    def in_a_scope() -> None:
        with checkpoint_scope(save_ops=["aten.addmm"]):
            thread = threading.Thread(target=lambda: step(other))
            thread.start()
            thread.join()
            step(model)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_a_scope()
    assert calls(model) == [2] * 8
    assert calls(other) == [1] * 8
    step(model)
    assert calls(model) == [3] * 8


def test_what_a_pool_counts_and_when_it_is_free() -> None:
    """Tensors that the block made and that are alive, wherever they are; views and in-place results add nothing."""
    before = torch.ones(10)
    with memory_pool_scope("cpu") as pool:
        kept = before * 2
        kept.add_(1).view(2, 5)
        assert (pool.allocated, pool.peak, pool.count) == (40, 40, 1)
        with memory_pool_scope("cpu") as inner:
            before.exp().sum()
        assert (inner.allocated, inner.peak, inner.count) == (0, 44, 2)
        assert pool.peak == 84
    assert pool.reserved == 40
    del kept
    assert (pool.allocated, pool.peak, pool.count) == (0, 84, 3)
    torch.ones(10)
    assert pool.count == 3


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SelectiveGradientCheckpointing(network(), 1.5), "a share of the layers lies in 0 to 1"),
        (lambda: SelectiveGradientCheckpointing(nn.Linear(2, 2)), "has no layers to choose from"),
        (lambda: SelectiveGradientCheckpointing(network(), save_ops=["gelu"]), "write it as `aten.mm`"),
        (lambda: checkpoint_scope(save_ops=["gelu"]).__enter__(), "write it as `aten.mm`"),
        (lambda: AdvancedFSDPManager(sharding_strategy="FULL"), "choose one of: FULL_SHARD"),  # type: ignore[arg-type]
        (
            lambda: AdvancedFSDPManager(activation_checkpointing={nn.GRU}).wrap_model(network()),
            "the model has no GRU to checkpoint",
        ),
    ],
)
def test_wrong_arguments(make: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert says in str(caught.value)


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"sharding_strategy": "SHARD_GRAD_OP", "activation_checkpointing": True},
    {"sharding_strategy": "NO_SHARD", "activation_checkpointing": {Block}},
    {"sharding_strategy": "HYBRID_SHARD", "mixed_precision": False},
    {"cpu_offload": True},
)


def managed(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Three steps of a loop by hand around a managed model, and around a plain one on the whole batch."""
    torch.manual_seed(0)
    x = torch.randn(3, 8, 16)
    torch.manual_seed(100 + rank)
    model = nn.Sequential(*[Block() for _ in range(4)])
    wrapped = AdvancedFSDPManager(**settings).wrap_model(model)
    local = sum(local_part(p).numel() for p in wrapped.parameters())
    torch.manual_seed(100)
    start = {name: p.detach().clone() for name, p in nn.Sequential(*[Block() for _ in range(4)]).named_parameters()}
    torch.manual_seed(100)
    plain = nn.Sequential(*[Block() for _ in range(4)])
    for one, rows in ((wrapped, slice(rank, None, 2)), (plain, slice(None))):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
        one.train()
        for layer in one.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0  # other numbers on each rank
        for batch in x:
            one(batch[rows]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = full_parameters(wrapped)
    return {
        "apart": max(float((found[name] - p.detach()).abs().max()) for name, p in plain.named_parameters()),
        "moved": min(float((found[name] - value).abs().max()) for name, value in start.items()),
        "names": list(found) == [name for name, _ in plain.named_parameters()],
        "local": local,
        "whole": sum(p.numel() for p in plain.parameters()),
        "calls": calls(model),
    }


def manage_all(rank: int) -> list[dict[str, Any]]:
    return [managed(rank, settings) for settings in SETTINGS]


def test_a_manager_shards_a_model_for_a_loop_by_hand() -> None:
    """Equal to one process on the whole batch; a rank holds its half where something is split."""
    for settings, found in zip(SETTINGS, run_ranks(manage_all, 2)[0], strict=True):
        assert found["apart"] < 1e-6, settings
        assert found["moved"] > 1e-3, settings
        assert found["names"]
        split = settings.get("sharding_strategy") != "NO_SHARD"
        assert found["local"] * (2 if split else 1) == found["whole"], settings
        assert found["calls"] == [6 if settings.get("activation_checkpointing") else 3] * 4


def test_a_manager_leaves_a_single_process_alone() -> None:
    model = network()
    assert AdvancedFSDPManager(cpu_offload=True).wrap_model(model) is model
    AdvancedFSDPManager(activation_checkpointing=True).wrap_model(model)
    assert [is_checkpointed(layer) for layer in model] == [True] * 8
