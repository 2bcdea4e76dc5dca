"""What the stages hold, optimizers too, put together under the names of the full model; and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from fairlead.errors import ConfigError
from fairlead_distributed._sharded import absent, on_all_ranks
from fairlead_strategies.mesh.full_state import Held, announced_as, like, on_first_rank
from fairlead_strategies.pipeline.stages import Names


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


def gather(
    own: Held,
    group: dist.ProcessGroup,
    stage: dist.ProcessGroup | None,
    device: torch.device,
    *,
    everyone: bool,
) -> dict[str, Any]:
    """The entries of all stages, tensors in CPU memory; of an entry that several have, that of the first.

    A collective of all ranks. With `everyone` each rank has everything in the end, its own entries as it has them; else
    rank 0 has it, and perhaps the first ranks of other pipelines, and the others nothing. One tensor travels at a time.

    Args:
        own: What this rank has.
        group: The ranks of its pipeline.
        stage: The ranks of its stage, of which some hold nothing of some entries (divided experts); None: each holds a
            part of every entry.
        device: Where tensors are sent from.
        everyone: Whether all ranks get everything.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    full: dict[str, Any]
    if stage is not None and not everyone:
        full = on_first_rank(own, device, stage)
    else:
        full = {name: _full(value, stage) for name, (value, _) in own.items()}
    kinds = {n: announced_as(v) for n, v in full.items()}
    announced: list[Any] = [None] * ranks
    dist.all_gather_object(announced, kinds, group=group)
    found: dict[str, Any] = {}
    for owner, theirs in enumerate(announced):
        for name, (value, shape, dtype) in theirs.items():
            if name in found:
                continue
            if dtype is None:
                found[name] = value
                continue
            if everyone:
                here = rank == owner
                there = full[name].to(device).contiguous() if here else torch.empty(shape, dtype=dtype, device=device)
                dist.broadcast(there, group_src=owner, group=group)
                mine = full.get(name, there)  # of a weight that several hold, which may have come apart
                # A copy: what is compared later must not be clipped or trained on meanwhile.
                found[name] = mine.to("cpu", copy=name in full)
            elif rank == owner == 0:
                found[name] = full[name].detach().cpu()
            elif rank == owner:
                found[name] = None
                dist.send(full[name].to(device).contiguous(), group_dst=0, group=group)
            else:
                found[name] = None
                if rank == 0:
                    there = torch.empty(shape, dtype=dtype, device=device)
                    dist.recv(there, group_src=owner, group=group)
                    found[name] = there.cpu()
    return found if everyone or rank == 0 else {}


def _full(value: Any, stage: dist.ProcessGroup | None) -> Any:
    if isinstance(value, DTensor):
        return on_all_ranks(value.detach(), stage) if stage is not None else value.full_tensor().detach()
    return value.detach() if isinstance(value, Tensor) else value


def local_state(full: Mapping[str, Any], own: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """What this rank loads of a full `state_dict`: entries of other stages are left out, unknown ones stay."""
    known = set(names.state)
    return {name: like(value, own.get(name)) for name, value in full.items() if name in own or name not in known}


def optimizer_entries(optimizer: Optimizer, names: Mapping[int, str]) -> Held:
    """The optimizer's state of each parameter as `name/key`."""
    return {
        f"{names[id(parameter)]}/{key}": (value, parameter)
        for parameter, state in optimizer.state.items()
        if id(parameter) in names
        for key, value in state.items()
    }


def full_optimizer_state(
    optimizer: Optimizer, found: Mapping[str, Any], groups: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """The `state_dict` that the optimizer of a single process has, from the entries of all stages."""
    numbers = {name: number for number, name in enumerate(n for group in groups for n in group)}
    state: dict[int, dict[str, Any]] = {}
    for entry, value in found.items():
        name, _, key = entry.rpartition("/")
        state.setdefault(numbers[name], {})[key] = value
    packed = []
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        packed.append({k: v for k, v in own.items() if k not in ("params", "param_names")})
        packed[-1]["params"] = [numbers[name] for name in group]
        if "param_names" in own:
            packed[-1]["param_names"] = list(group)
    return {"state": dict(sorted(state.items())), "param_groups": packed}


def local_optimizer_state(
    full: Mapping[str, Any], groups: Sequence[Sequence[str]], own: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The part of a single process's `state_dict` that belongs to this rank's parameters, renumbered."""
    state: dict[int, Any] = {}
    packed = []
    number = 0
    for saved, group in zip(full["param_groups"], groups, strict=True):
        mine = []
        for index, name in zip(saved["params"], group, strict=True):
            if name not in own:
                continue
            if index in full["state"] and not absent(own[name]):
                entries = full["state"][index]
                state[number] = {
                    key: like(value, own[name]) if _as_large(value, own[name]) else value
                    for key, value in entries.items()
                }
            mine.append(number)
            number += 1
        packed.append({**saved, "params": mine})
        if "param_names" in saved:
            packed[-1]["param_names"] = [name for name in group if name in own]
    return {"state": state, "param_groups": packed}


def _as_large(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape
