from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fairlead.errors import ConfigError
from fairlead_distributed.activation_checkpointing import checkpoint_layers, find_layers, is_checkpointed


class Block(nn.Module):
    """Has what a second forward pass could get wrong: random numbers, running statistics, a power iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        out: Tensor = x + scale * self.dropout(torch.relu(self.norm(self.linear(x))))
        return out


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(8, 1))


def calls(model: nn.Module) -> list[int]:
    return [layer.calls for layer in model.modules() if isinstance(layer, Block)]


def after_a_step(model: nn.Module) -> dict[str, Tensor]:
    """Gradients and buffers after one backward pass."""
    torch.manual_seed(1)
    model(torch.randn(16, 8)).sum().backward()
    gradients = {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return gradients | {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("save_ops", [(), ("aten.addmm",), (torch.ops.aten.mm.default, "torch.ops.aten.addmm.default")])
def test_a_checkpointed_model_computes_the_same_bits(save_ops: Any) -> None:
    """Gradients, and buffers that a forward pass changes, which change once."""
    plain, again = network(), network()
    assert checkpoint_layers(again, {Block}, save_ops=save_ops) == 3
    expected, found = after_a_step(plain), after_a_step(again)
    assert expected.keys() == found.keys()
    assert len(expected) > 20
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert all(bool(value.any()) for name, value in expected.items() if "0.norm.weight.grad" in name)
    assert calls(again) == [2, 2, 2]
    assert calls(plain) == [1, 1, 1]


def test_exactly_the_layers_of_the_classes_are_checkpointed_once() -> None:
    model = network()
    assert checkpoint_layers(model, {Block}) == 3
    assert checkpoint_layers(model, [Block, nn.Linear]) == 7  # three of them inside of blocks
    assert checkpoint_layers(model, ()) == 0
    kinds = {type(layer).__name__ for layer in model.modules() if is_checkpointed(layer)}
    assert kinds == {"Block", "ParametrizedLinear", "Linear"}
    after_a_step(model)
    assert calls(model) == [2, 2, 2]


def test_names_signature_and_copies_stay() -> None:
    """A copy computes with its own weights: weight averaging trains on one."""
    model, plain = network(), network()
    checkpoint_layers(model, {Block})
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(inspect.signature(model[0].forward).parameters) == ["x", "scale"]
    twin = copy.deepcopy(model)
    after_a_step(twin)
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters())
    linear = nn.Sequential(nn.Linear(2, 2))
    checkpoint_layers(linear, {nn.Linear})
    loaded = pickle.loads(pickle.dumps(linear))
    assert loaded[0].forward.layer is loaded[0]


@pytest.mark.parametrize(
    ("classes", "save_ops", "says"),
    [
        ({nn.LSTM}, (), "the model has no LSTM to checkpoint"),
        ({nn.LSTM, nn.GRU}, (), "the model has no GRU or LSTM"),
        ({Block}, ["aten.mmm"], "no operator 'aten.mmm'"),
        ({Block}, ["mm"], "write it as `aten.mm`"),
        ({Block}, ["aten.mm.defualt"], "did you mean 'aten.mm.default'"),
    ],
)
def test_what_is_not_there_is_said(classes: Any, save_ops: Any, says: str) -> None:
    model = network()
    with pytest.raises(ConfigError) as caught:
        checkpoint_layers(model, classes, save_ops=save_ops)
    assert says in str(caught.value)
    assert not any(map(is_checkpointed, model.modules()))
    if not save_ops:
        assert "BatchNorm1d, Block" in str(caught.value)


def test_the_layers_of_a_model_are_the_items_of_its_outermost_lists() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.Tanh())
    model = nn.ModuleDict({"stem": nn.Linear(2, 2), "body": nn.ModuleList([inner, nn.ModuleList([nn.Linear(2, 2)])])})
    assert list(find_layers(model)) == ["body.0", "body.1.0"]
    assert list(find_layers(inner)) == ["0", "1"]
    assert find_layers(nn.Linear(2, 2)) == {}
