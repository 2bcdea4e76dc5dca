"""Optimizer state by numbers, as torch and plain Lightning have it, and by parameter names, as sharded files do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from fairlead.errors import CheckpointError

__all__ = ["by_name", "by_number"]

_BUFFERS: Final = ("running_mean", "running_var", "num_batches_tracked")
_LIKE_PARAMETER: Final = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum")


def by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with its parameters numbered in the order of its groups.

    Raises:
        CheckpointError: It has state for a parameter that is in none of its groups.
    """
    groups = state.get("param_groups", [])
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    states = state.get("state", {})
    if lost := sorted(str(name) for name in states if name not in numbers):
        raise CheckpointError("an optimizer has state of parameters that it does not train", why=", ".join(lost[:8]))
    ordered = sorted(states, key=lambda name: numbers[name])
    return {
        "state": {numbers[name]: states[name] for name in ordered},
        "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups],
    }


def by_name(state: Mapping[str, Any], weights: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """An optimizer's state with the parameters' names instead of numbers.

    The names are those the optimizer recorded (it was given `named_parameters()`); else those of the weights in
    their order, where numbers and shapes leave no doubt.

    Raises:
        CheckpointError: There is doubt.
    """
    groups = state["param_groups"]
    names = dict(_recorded(groups))
    numbers = [number for group in groups for number in group["params"]]
    if len(names) != len(numbers):
        names = _in_order(state, groups, numbers, weights, where)
    return {
        "state": {names[number]: value for number, value in state["state"].items()},
        "param_groups": [{**group, "params": [names[number] for number in group["params"]]} for group in groups],
    }


def _recorded(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str]]:
    for group in groups:
        yield from zip(group["params"], group.get("param_names", ()), strict=False)


def _in_order(
    state: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    numbers: Sequence[int],
    weights: Mapping[str, Any],
    where: str,
) -> dict[int, str]:
    parameters = _parameters(weights)
    if len(groups) != 1:
        raise _doubt(where, f"its parameters are in {len(groups)} groups, whose order is not that of the model")
    if len(parameters) != len(numbers):
        raise _doubt(where, f"it has {len(numbers)} parameters, the weights are {len(parameters)}")
    names = dict(zip(numbers, parameters, strict=True))
    for number, value in state["state"].items():
        for key in _LIKE_PARAMETER:
            held = value.get(key) if isinstance(value, Mapping) else None
            shape = parameters[names[number]].shape
            if isinstance(held, torch.Tensor) and held.shape != shape:
                raise _doubt(where, f"{names[number]} is {list(shape)}, but number {number} is {list(held.shape)}")
    return names


def _parameters(weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What an optimizer may train, each once: tied weights are one parameter."""
    found: dict[str, torch.Tensor] = {}
    seen = set()
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        if name.rpartition(".")[2] in _BUFFERS:
            continue
        place = (value.data_ptr(), value.shape, value.stride())
        if value.numel() and place in seen:
            continue
        seen.add(place)
        found[name] = value
    return found


def _doubt(where: str, why: str) -> CheckpointError:
    return CheckpointError(
        "which parameters an optimizer's state belongs to is not certain",
        where=where,
        why=f"the optimizer has numbered its parameters, and {why}",
        fix="--weights leaves the optimizer out; sharded strategies also resume from the plain file itself;\n"
        "an optimizer made of model.named_parameters() records the names",
    )
