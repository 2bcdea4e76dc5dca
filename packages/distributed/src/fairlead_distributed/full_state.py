"""Full parameters and gradients of a module, however it is split: to compare a layout with one process.

For plain modules, DistributedDataParallel, and DTensors (`fully_shard`, tensor parallelism, experts that are on some
ranks only). What keeps them otherwise
(DeepSpeed's partitions, a pipeline's stages) has methods of these names on its strategy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fairlead.errors import ConfigError
from fairlead_distributed._sharded import any_absent, is_dtensor, is_fsdp1, on_all_ranks
from fairlead_distributed.info import is_initialized
from fairlead_distributed.objects import gather_objects

_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


def full_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Each parameter by its name in the unsplit model, a full copy on the CPU. A collective where any is sharded.

    Raises:
        ConfigError: The module is of FullyShardedDataParallel, whose parameters are flat.

    Example:
        >>> sorted(full_parameters(nn.Linear(2, 1)))
        ['bias', 'weight']
    """
    named = dict(_named(module))
    apart = any_absent(named.values())
    return {name: _full(parameter, apart) for name, parameter in named.items()}


def full_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Each buffer, the ones that are not saved too, as `full_parameters` has it."""
    base = module.module if isinstance(module, DistributedDataParallel) else module
    return {plain_name(name): _full(buffer) for name, buffer in base.named_buffers()}


def full_gradients(module: nn.Module) -> dict[str, Tensor]:
    """The gradients that are there on any rank, as `full_parameters` has them; zeros where a rank has none.

    Between the backward pass and the optimizer's step, on all ranks. Sharded ones are put together, and partial sums
    added up; a plain gradient is this rank's own, which after a right reduction is the same on all ranks.

    Raises:
        ConfigError: As `full_parameters`.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
        >>> full_gradients(model)
        {'weight': tensor([[3., 4.]])}
    """
    named = [(name, one) for name, one in _named(module) if one.requires_grad]
    here = [one.grad is not None for _, one in named]
    # A rank without a gradient takes part all the same: the others would wait for its shard.
    held = [any(ranks) for ranks in zip(*gather_objects(here), strict=True)] if is_initialized() else here
    apart = any_absent(one for _, one in named)
    grads = ((name, one.grad if one.grad is not None else torch.zeros_like(one)) for name, one in named)
    return {name: _full(grad, apart) for (name, grad), there in zip(grads, held, strict=True) if there}


def placements(module: nn.Module) -> dict[str, str]:
    """How each parameter is split: `Shard(dim=0) over shard`; a parameter that every rank holds in full is left out."""
    found = {}
    for name, parameter in _named(module):
        if is_dtensor(parameter):
            dims = parameter.device_mesh.mesh_dim_names or tuple(map(str, range(parameter.device_mesh.ndim)))
            cuts = [f"{p!r} over {dim}" for p, dim in zip(parameter.placements, dims, strict=True)]
            found[name] = ", ".join(cuts)
    return found


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    if any(is_fsdp1(part) for part in module.modules()):
        raise ConfigError(
            "the parameters of FullyShardedDataParallel cannot be put together",
            where=type(module).__name__,
            why="each rank has other parts of flat parameters",
            fix="shard the module with torch's fully_shard",
        )
    base = module.module if isinstance(module, DistributedDataParallel) else module
    for name, parameter in base.named_parameters():
        yield plain_name(name), parameter


def plain_name(name: str) -> str:
    """The name of a parameter in the unsplit model.

    Example:
        >>> plain_name("blocks.0._checkpoint_wrapped_module.up.weight")
        'blocks.0.up.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def plain_state(state: dict[str, Any]) -> dict[str, Any]:
    """A state dictionary under the names of the unsplit model; itself where it has those already."""
    if all(plain_name(name) == name for name in state):
        return state
    return _renamed(state, plain_name)


def named_as(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dictionary under the names that `module.load_state_dict` knows: matched without those of wrappers.

    What matches nothing keeps its name. FSDP1 and activation checkpointing take their own names out by themselves.

    Example:
        >>> model = nn.Sequential(torch.compile(nn.Linear(2, 1), backend="eager"))
        >>> list(named_as(model, {"0.weight": torch.zeros(1, 2)}))
        ['0._orig_mod.weight']
    """
    own: dict[str, str] = {}
    for path, _ in module.named_modules(remove_duplicate=False):
        known = ".".join(part for part in path.split(".") if part not in _WRAPPERS - {"_orig_mod"})
        if plain_name(path) not in own or len(known) > len(own[plain_name(path)]):
            own[plain_name(path)] = known  # the module inside of its wrapper

    def name_here(name: str) -> str:
        path, _, leaf = plain_name(name).rpartition(".")
        if path not in own and path.partition(".")[0] == "module":  # of DistributedDataParallel
            path = path.partition(".")[2]
        return f"{own[path]}.{leaf}".lstrip(".") if path in own else name

    if all(name_here(name) == name for name in state):
        return dict(state) if not isinstance(state, dict) else state
    return _renamed(state, name_here)


def _renamed(state: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    renamed: Any = OrderedDict((rename(name), value) for name, value in state.items())
    versions = getattr(state, "_metadata", None)  # of the modules' own formats
    if versions is not None:
        renamed._metadata = OrderedDict((rename(f"{path}.x")[:-2], value) for path, value in versions.items() if path)
        renamed._metadata[""] = versions.get("", {})
    return cast("dict[str, Any]", renamed)


@torch.no_grad()
def _full(tensor: Tensor, apart: bool = False) -> Tensor:
    """With `apart`, some of the module's parameters are on some ranks only."""
    detached = tensor.detach()
    if apart:
        return on_all_ranks(detached).to("cpu", copy=True)
    full = detached.full_tensor() if is_dtensor(detached) else detached
    return full.to("cpu", copy=True)
