"""The state of a model in torch's first FSDP: complete on the requesting ranks, or each rank's part as DTensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor, Replicate, zeros
from torch.nn import Module
from torch.optim import Optimizer

from fairlead_distributed.full_state import named_as, plain_name, plain_state
from fairlead_distributed.objects import gather_objects

Key = tuple[str | int, ...]
"""Where a tensor is in a checkpoint: the keys that lead to it."""


@contextmanager
def full_state(model: Module, *, rank0_only: bool) -> Iterator[None]:
    """Inside, states of the model and its optimizers are complete and in host memory; on all ranks together."""
    # Moving to the CPU what is there already keeps a view of memory that FSDP frees: a segmentation fault (torch 2.13).
    offload = _computes_on_gpu(model)
    weights = FullStateDictConfig(offload_to_cpu=offload, rank0_only=rank0_only)
    optimizers = FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=rank0_only)
    with _state_type(model, StateDictType.FULL_STATE_DICT, weights, optimizers):
        yield


@contextmanager
def sharded_state(model: Module) -> Iterator[None]:
    """Inside, they are this rank's part, as DTensors on the mesh of the model, on its device."""
    weights, optimizers = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    with _state_type(model, StateDictType.SHARDED_STATE_DICT, weights, optimizers):
        yield


@contextmanager
def _state_type(model: Module, kind: StateDictType, weights: Any, optimizers: Any) -> Iterator[None]:
    with ExitStack() as stack:
        with _without_advice():
            stack.enter_context(FullyShardedDataParallel.state_dict_type(model, kind, weights, optimizers))
        try:
            yield
        finally:
            with _without_advice():
                stack.close()


@contextmanager
def _without_advice() -> Iterator[None]:
    """Torch recommends newer functions, which set the same underneath, and crash on a CPU as well."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP.state_dict_type", FutureWarning)
        yield


def _units(model: Module) -> list[FullyShardedDataParallel]:
    return [part for part in model.modules() if isinstance(part, FullyShardedDataParallel)]


def _computes_on_gpu(model: Module) -> bool:
    return any(str(unit.compute_device) != "cpu" for unit in _units(model))


def _named(model: Module) -> bool:
    """Whether the parameters are the model's own."""
    return all(unit._use_orig_params for unit in _units(model))


def named_optimizer_state(model: Module, optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state by the names of the unsplit model, complete or in parts, as the surrounding block says."""
    return _renamed(FullyShardedDataParallel.optim_state_dict(model, optimizer), plain_state)


def _renamed(state: dict[str, Any], rename: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """An optimizer's state with other names of its parameters; empty on ranks that do not have it."""
    if not state or any(isinstance(name, int) for group in state["param_groups"] for name in group["params"]):
        return state
    groups = [{**group, "params": list(rename(dict.fromkeys(group["params"])))} for group in state["param_groups"]]
    return {**state, "state": dict(rename(state["state"])), "param_groups": groups}


def numbered_optimizer_state(model: Module, optimizer: Optimizer) -> dict[str, Any]:
    """A full optimizer state as any optimizer has it, with numbers for its parameters; empty on ranks without it."""
    state = named_optimizer_state(model, optimizer)
    if not state or not state["state"] or not _named(model):
        return state  # torch numbers no empty state, and one flat parameter has the names of many
    state = _renamed(state, lambda names: named_as(model, names))
    numbered: dict[str, Any] = FullyShardedDataParallel.rekey_optim_state_dict(
        state, OptimStateKeyType.PARAM_ID, model, optim=optimizer
    )
    return numbered


def load_optimizer_state(model: Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads an optimizer's state, complete or in parts, as the surrounding block says; on all ranks together."""
    named = state
    if any(isinstance(name, int) for group in state["param_groups"] for name in group["params"]):
        named = FullyShardedDataParallel.rekey_optim_state_dict(
            dict(state), OptimStateKeyType.PARAM_NAME, model, optim=optimizer
        )
    named = _renamed(dict(named), lambda names: named_as(model, names))
    own = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, dict(named))
    optimizer.load_state_dict(own)


def mixed_units(model: Module) -> dict[str, list[str]]:
    """Units that flatten frozen and trained parameters together so that some rank has none of the trained ones.

    The frozen parameters of each by the unit's name: torch cannot put the state of its optimizer together (2.13).
    """
    found: dict[str, list[str]] = {}
    for name, handle in _handles(model):
        params = handle.flat_param._params
        if params is None or not handle.uses_sharded_strategy:
            continue
        trained = [one.requires_grad for one in params]
        flat, size = handle.flat_param, handle.flat_param._sharded_size.numel()
        ranks: set[int] = set()
        start, wanted = 0, iter(trained)
        for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
            if not padding and next(wanted) and numel:
                ranks.update(range(start // size, (start + numel - 1) // size + 1))
            start += numel
        if any(trained) and not all(trained) and len(ranks) < handle.world_size:
            frozen = [own for own, needed in zip(flat._fqns, trained, strict=True) if not needed]
            found[plain_name(name)] = [_full_name(name, own) for own in frozen]
    return found


def full_parameters(model: Module) -> dict[str, Tensor]:
    """All parameters by the names of the unsplit model, complete and in host memory, on every rank."""
    names = [plain_name(name) for name, _ in model.named_parameters()]
    with full_state(model, rank0_only=False):
        state = plain_state(model.state_dict())
    if not _named(model):
        buffers = {plain_name(name) for name, _ in model.named_buffers()}
        names = [name for name in state if name not in buffers]
    return {name: state[name].detach().cpu() for name in names}


def full_gradients(model: Module) -> dict[str, Tensor]:
    """The gradients after a backward pass in the same way; without those of parameters that have none.

    Also those of flat parameters, which torch's `summon_full_params` does not gather.
    """
    return _gathered(model, lambda parameter: parameter.grad)


def full_optimizer_state(model: Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """What an optimizer holds for each parameter, in the same way: `{"head.weight": {"exp_avg": ...}}`.

    Numbers, such as Adam's count of steps, are those of this rank, or of the first one that has the parameter's state.
    What has another shape than its parameter is left out.
    """
    states = optimizer.state.items()
    shaped = {key for parameter, state in states for key, value in state.items() if _like(value, parameter)}
    found: dict[str, dict[str, Tensor]] = {}
    for key in sorted(set().union(*gather_objects(shaped))):

        def held(parameter: Tensor, key: str = key) -> Tensor | None:
            value = optimizer.state.get(parameter, {}).get(key)
            return value if _like(value, parameter) else None

        for name, full in _gathered(model, held).items():
            found.setdefault(name, {})[key] = full
    own = _numbers(model, optimizer)
    for rank in [own, *gather_objects(own)]:
        for (name, key), value in rank.items():
            found.setdefault(name, {}).setdefault(key, torch.tensor(value))
    return found


def _like(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == parameter.shape


def _numbers(model: Module, optimizer: Optimizer) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for name, handle in _handles(model):
        flat = handle.flat_param
        for index, own in enumerate(flat._fqns):
            parameter = flat._params[index] if flat._params is not None else flat
            for key, value in optimizer.state.get(parameter, {}).items():
                number = isinstance(value, int | float) and not isinstance(value, bool)
                if number or (isinstance(value, Tensor) and value.ndim == 0):
                    found[_full_name(name, own), key] = float(value)
    return found


def _handles(model: Module) -> Iterator[tuple[str, Any]]:
    """The handle of each unit that has flat parameters, by the unit's name."""
    for name, unit in model.named_modules():
        if isinstance(unit, FullyShardedDataParallel) and unit._handle is not None:
            yield name, unit._handle


def _full_name(unit: str, own: str) -> str:
    return plain_name(f"{unit}.{own}".lstrip("."))


@torch.no_grad()
def _gathered(model: Module, part: Callable[[Any], Tensor | None]) -> dict[str, Tensor]:
    """Full tensors of the parameters' shapes, of what each rank has for its own parts; None: nothing."""
    found: dict[str, Tensor] = {}
    for name, handle in _handles(model):
        flat = handle.flat_param
        for index, own in enumerate(flat._fqns):
            shard, numel = flat._shard_param_infos[index], flat._numels[index]
            held = part(flat._params[index] if flat._params is not None else flat)
            # The last element says whether any rank has one.
            full = torch.zeros(numel + 1, dtype=flat.dtype, device=handle.device)
            first, last = shard.intra_param_start_idx, shard.intra_param_end_idx
            start = 0 if flat._params is not None else shard.offset_in_shard or 0
            if not handle.uses_sharded_strategy:
                first, last = 0, numel - 1
                start = 0 if flat._params is not None else sum(flat._numels[:index])
            if held is not None and first is not None and last is not None:
                length = last + 1 - first
                full[first : last + 1], full[-1] = held.flatten()[start : start + length], 1
            if handle.uses_sharded_strategy:
                dist.all_reduce(full, group=handle.process_group)
            if full[-1]:
                found[_full_name(name, own)] = full[:-1].view(flat._shapes[index]).cpu()
    return found


def destinations(
    weights: Mapping[str, Any], optimizers: Sequence[Optimizer]
) -> Callable[[Key, torch.Size, torch.dtype], Tensor | None]:
    """Which tensor to read into, for a key in Lightning's checkpoint; see `ShardedLoads`.

    `weights` are this rank's parts. The state of a parameter is laid out as the parameter is; what has another shape
    is held in full by each rank.
    """
    names = {f"optimizer_{index}" for index in range(len(optimizers))}

    def destination(key: Key, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        if key[0] in ("state_dict", "model"):
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
