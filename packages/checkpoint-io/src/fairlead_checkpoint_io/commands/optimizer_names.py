"""Which parameter each number of an optimizer's state is: plain Lightning has numbers, sharded files have names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from fairlead.errors import CheckpointError

_BUFFERS: Final = ("running_mean", "running_var", "num_batches_tracked")
_LIKE_PARAMETER: Final = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum")


def parameter_names(state: Mapping[str, Any], weights: Mapping[str, Any], *, where: str) -> list[str]:
    """The names of an optimizer's parameters, in the order of its groups.

    They are those the optimizer recorded (it was given `named_parameters()`); else those of the weights in their
    order, where numbers and shapes leave no doubt.

    Raises:
        CheckpointError: There is doubt.
    """
    groups = state["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    recorded = {
        number: name
        for group in groups
        for number, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    if len(recorded) == len(numbers):
        return [recorded[number] for number in numbers]
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
    return list(parameters)


def _parameters(weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What an optimizer may train, each once: tied weights are one parameter."""
    found: dict[str, torch.Tensor] = {}
    seen = set()
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        if name.rpartition(".")[2] in _BUFFERS:
            continue
        memory = (value.data_ptr(), value.shape, value.stride())
        if value.numel() and memory in seen:
            continue
        seen.add(memory)
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
