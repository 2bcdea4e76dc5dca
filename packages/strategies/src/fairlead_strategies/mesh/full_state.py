"""Full checkpoints of a model in which some parameters lie on some ranks only (experts), and where shards are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, zeros
from torch.nn import Module
from torch.optim import Optimizer

from fairlead_distributed._sharded import absent, first_rank
from fairlead_distributed.full_state import plain_state
from fairlead_strategies.mesh.parallelize import reshard

Key = tuple[str | int, ...]
"""Where a tensor is in a checkpoint: the keys that lead to it."""


def like(value: Any, own: Any) -> Any:
    """A full tensor cut as `own` is, without communication; anything else stays as it is."""
    if not isinstance(own, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    device = own.to_local().device
    return distribute_tensor(value.to(device), own.device_mesh, own.placements, src_data_rank=None)


@contextmanager
def tuples_preserved(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """What was a tuple in a group before a load in the block is one after it: torch makes lists of them on the way."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    names = [[name for name, value in group.items() if isinstance(value, tuple)] for group in groups]
    yield
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group, tuples in zip(groups, names, strict=True):
        group.update({name: tuple(group[name]) for name in tuples})


Held = Mapping[Any, tuple[Any, Any]]
"""Entries of a state by their keys: the value, and the parameter that it belongs to."""


def on_first_rank(own: Held, device: torch.device, group: dist.ProcessGroup | None = None) -> dict[Any, Any]:
    """The entries of a group's ranks on its first, tensors complete and in CPU memory; the others get nothing.

    A collective of them; without a group, of all ranks.

    What belongs to parameters of all ranks comes first, one tensor at a time; then what belongs to those of some. Their
    meshes do not overlap: each puts its tensors together while the first rank hears of one mesh after the other.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    found: dict[Any, Any] = {}
    apart: dict[Any, Any] = {}
    speaks = False
    for key, (value, parameter) in own.items():
        if not _apart(parameter, size):
            full = _full(value)
            if rank == 0:
                found[key] = full.cpu() if isinstance(full, Tensor) else full
        elif not absent(parameter):
            apart[key] = value
            speaks = first_rank(parameter.device_mesh) == dist.get_rank()
    announced: list[Any] = [None] * size
    announcement = {key: announced_as(value) for key, value in apart.items()} if speaks else {}
    dist.all_gather_object(announced, announcement, group=group)
    for key, value in apart.items():
        full = _full(value)
        if rank == 0:
            found[key] = full.cpu() if isinstance(full, Tensor) else full
        elif speaks and isinstance(full, Tensor):
            dist.send(full.to(device).contiguous(), group_dst=0, group=group)
    for source in range(1, len(announced) if rank == 0 else 0):
        for key, (value, shape, dtype) in announced[source].items():
            found[key] = value
            if dtype is not None:
                there = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(there, group_src=source, group=group)
                found[key] = there.cpu()
    return found


def model_on_first_rank(model: Module, device: torch.device) -> dict[str, Any]:
    """The weights on rank 0, as one process has them; the others get nothing. A collective."""
    own = plain_state(get_model_state_dict(model))
    found = on_first_rank({name: (value, value) for name, value in own.items()}, device)
    return {name: found[name] for name in own} if found else {}


def optimizer_on_first_rank(model: Module, optimizer: Optimizer, device: torch.device) -> dict[str, Any]:
    """The optimizer's state on rank 0, as Lightning gathers it; the others get nothing. A collective.

    One process reads it too. But Lightning's sharded strategies take its numbers for those of the model's parameters in
    their order, whatever the groups are, so that these are written.
    """
    reshard(model)
    forget_absent([optimizer])
    state = optimizer.state_dict()
    parameters = _parameters(optimizer, state)
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    called = {key: numbers.setdefault(id(parameter), len(numbers)) for key, parameter in parameters.items()}
    own = {(n, key): (v, parameters[n]) for n, entries in state["state"].items() for key, v in entries.items()}
    found = on_first_rank(own, device)
    if dist.get_rank():
        return {}
    entries: dict[int, dict[str, Any]] = {}
    for (number, key), value in found.items():
        entries.setdefault(called[number], {})[key] = value
    groups = [{**group, "params": [called[key] for key in group["params"]]} for group in state["param_groups"]]
    return {"state": dict(sorted(entries.items())), "param_groups": groups}


def cut_model(full: Mapping[str, Any], model: Module) -> dict[str, Any]:
    """A full state of a model as each rank holds it, without communication."""
    own = model.state_dict()
    return {name: like(value, own.get(name)) for name, value in full.items()}


def cut_optimizer(full: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """A full state of an optimizer as each rank holds it, without communication."""
    parameters = _parameters(optimizer, full)
    entries = {}
    for number, state in full["state"].items():
        own = parameters.get(number)
        if own is None:  # of other groups than the optimizer has, which it says itself
            entries[number] = state
        elif not absent(own):
            entries[number] = {key: _cut(value, own) for key, value in state.items()}
    return {**full, "state": entries}


def _cut(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    # Never the tensor itself, which may be mapped from a file that the next save overwrites.
    return like(value, parameter) if value.shape == parameter.shape else value.clone()


def forget_absent(optimizers: Iterable[Optimizer]) -> None:
    """Drops the state of parameters that this rank does not hold.

    Loading makes some, under the names that the owners' state has as well. It would never change, and be saved as
    theirs: their count of steps is a plain tensor, of which any rank's is written.
    """
    for optimizer in optimizers:
        for parameter in [one for one in optimizer.state if absent(one)]:
            del optimizer.state[parameter]


def _parameters(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[Any, Tensor]:
    """The optimizer's parameters by what they are called in a state."""
    called = [key for group in state["param_groups"] for key in group["params"]]
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return dict(zip(called, own, strict=False))


def _apart(parameter: Any, ranks: int) -> bool:
    return isinstance(parameter, DTensor) and parameter.device_mesh.size() < ranks


def _full(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach() if isinstance(value, Tensor) else value


def announced_as(value: Any) -> tuple[Any, Any, Any]:
    """What travels with the announcement: a value, or shape and format of a tensor that follows."""
    return (None, tuple(value.shape), value.dtype) if isinstance(value, Tensor) else (value, None, None)


def destinations(
    weights: Mapping[str, Any], optimizers: Sequence[Optimizer]
) -> Callable[[Key, torch.Size, torch.dtype], Tensor | None]:
    """Which tensor to read into, for a key in Lightning's checkpoint; see `ShardedLoads`.

    `weights` are this rank's parts. The state of a parameter is laid out as the parameter is; what has another shape
    is held in full by each rank.
    """
    names = {f"optimizer_{index}" for index in range(len(optimizers))}

    def destination(key: Key, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        if key[0] in ("state_dict", "model"):  # the first FSDP calls the weights `model`
            own = weights.get(str(key[1]))
            return own if isinstance(own, Tensor) and own.shape == size and own.dtype == dtype else None
        known = len(key) == 4 and key[1] == "state" and key[0] in names
        parameter = weights.get(str(key[2])) if known else None
        if not isinstance(parameter, DTensor) or (not size and parameter.ndim):
            return None
        if parameter.shape == size:
            return torch.empty_like(parameter, dtype=dtype)
        mesh = parameter.device_mesh
        return zeros(*size, dtype=dtype, device_mesh=mesh, placements=[Replicate()] * mesh.ndim)

    return destination
