"""Optimizers of a pipeline: made for the whole model, and left with the parameters of a rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from fairlead.errors import ConfigError


def named_groups(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """For each group of an optimizer the names of its parameters.

    Raises:
        ConfigError: It cannot be used where each rank has some of the parameters.
    """
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "LBFGS does not work in a pipeline",
            where="configure_optimizers",
            why="each of its steps depends on all parameters together, and evaluates the loss several times",
            fix="use an optimizer that updates each parameter by itself, such as AdamW",
        )
    named = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    return [list(dict.fromkeys(group)) for group in named]


def keep_own(optimizer: Optimizer, own: set[int]) -> None:
    """Leaves this rank's parameters in an optimizer."""
    for group in optimizer.param_groups:
        own_numbers = [number for number, parameter in enumerate(group["params"]) if id(parameter) in own]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [group[key][number] for number in own_numbers]
    for parameter in [one for one in optimizer.state if id(one) not in own]:
        del optimizer.state[parameter]


def to_device(optimizers: list[Optimizer], device: torch.device) -> None:
    """Moves what the optimizers keep of their parameters to where these are."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device)
