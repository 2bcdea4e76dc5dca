"""A checkpoint taken apart and put together again is what it was, in every bit, whatever its optimizer keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fairlead.errors import CheckpointError
from fairlead_checkpoint_io.files.layout import Leaf, from_layout, named, numbered, to_layout


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


def names_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str | None]:
    found = {id(p): name for name, p in module.named_parameters()}
    return [found.get(id(p)) for group in optimizer.param_groups for p in group["params"]]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


def round_trip(checkpoint: dict[str, Any], *names: list[str | None]) -> dict[str, Any]:
    layout = to_layout(checkpoint, names)
    values = {
        layout.paths[name]: value.value if isinstance(value, Leaf) else value for name, value in layout.values.items()
    }
    return from_layout(values, layout.rest)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), amsgrad=True, foreach=False),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
        lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
    ],
    ids=["plain", "momentum", "adamw", "adafactor", "lbfgs"],
)
def test_every_optimizer_comes_back(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """State and groups with all their entries; one that was never stepped, too."""
    module = model()
    optimizer = make(module.parameters())
    for steps in range(2):
        checkpoint = {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": steps}
        back = round_trip(checkpoint, names_of(module, optimizer))
        assert equal(back["optimizer_states"], [optimizer.state_dict()])
        assert equal(back["state_dict"], module.state_dict())
        assert back["epoch"] == steps
        assert vars(back["state_dict"])["_metadata"] == vars(module.state_dict())["_metadata"]

        def closure() -> float:
            optimizer.zero_grad()
            loss = module(torch.ones(5, 3)).square().sum()
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)


def test_names_stand_for_numbers_in_groups_of_any_order() -> None:
    """Lightning's sharded layout: its own strategies find parameters by name."""
    module = model()
    parameters = dict(module.named_parameters())
    groups = [{"params": [parameters["2.bias"], parameters["0.weight"]]}, {"params": [parameters["1.weight"]]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    module(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    given = named(state, names_of(module, optimizer))
    assert list(given["state"]) == ["2.bias", "0.weight", "1.weight"]
    assert [group["params"] for group in given["param_groups"]] == [["2.bias", "0.weight"], ["1.weight"]]
    assert given["state"]["2.bias"]["momentum_buffer"] is state["state"][0]["momentum_buffer"]
    assert equal(numbered(given), state)
    layout = to_layout({"state_dict": {}, "optimizer_states": [state]}, [names_of(module, optimizer)])
    assert "optimizer_0.state.2.bias.momentum_buffer" in layout.values
    assert layout.paths["optimizer_0.param_groups.1.lr"] == ("optimizer_0", "param_groups", 1, "lr")


def test_a_parameter_that_is_not_the_modules_has_a_name_of_its_own() -> None:
    module, other = model(), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*module.parameters(), other], lr=0.1, momentum=0.5)
    (module(torch.ones(5, 3)).sum() + other.sum()).backward()
    optimizer.step()
    state = optimizer.state_dict()
    given = named(state, names_of(module, optimizer))
    assert list(given["state"])[-1] == f"_unnamed.{len(state['state']) - 1}"
    assert equal(numbered(given), state)
    assert equal(numbered(named(state, ())), state)  # as where nobody knows the module


def test_what_torchs_planner_would_change_is_kept_as_it_is() -> None:
    """It makes text of a mapping's keys, and lists of tuples."""
    odd = {
        "history": {0: torch.ones(2), 1: [torch.zeros(1)]},
        "pair": (torch.ones(1), 2),
        "none": None,
        "sparse": torch.eye(2).to_sparse(),
        "flag": True,
    }
    state = {"state": {0: odd}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}]}
    back = round_trip({"state_dict": {"w": torch.ones(1)}, "optimizer_states": [state]}, ["w"])
    found = back["optimizer_states"][0]
    assert equal(found["state"][0].pop("sparse").to_dense(), torch.eye(2))
    odd.pop("sparse")
    assert equal(found, state)


@pytest.mark.parametrize(
    "checkpoint",
    [
        {"state_dict": {}, "optimizer_states": []},
        {"state_dict": {"w": torch.ones(1)}, "epoch": 2},
        {"state_dict": {"bn": torch.tensor(3), "layer._extra_state": {"a": torch.ones(1)}}, "optimizer_states": []},
    ],
    ids=["nothing", "weights-only", "extra-state"],
)
def test_a_missing_part_is_not_an_empty_one(checkpoint: dict[str, Any]) -> None:
    """Lightning tells a checkpoint of weights only by the part that it lacks."""
    back = round_trip(checkpoint)
    assert equal(dict(sorted(back.items())), dict(sorted(checkpoint.items())))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"state": {}, "param_groups": [{"params": [0, 1]}]}, "two parameters of an optimizer have one name"),
        ({"state": {0: {3: 1}}, "param_groups": [{"params": [0]}]}, "has the key 3"),
    ],
)
def test_what_has_no_place_is_refused(state: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        to_layout({"state_dict": {}, "optimizer_states": [state]}, [["a", "a"]])
