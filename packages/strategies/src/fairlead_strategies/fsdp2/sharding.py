"""How a module that does not parallelise itself is sharded, and where the parts of its checkpoint are read into.

Every *unit* is gathered before its forward and freed after it, so the memory saved depends on how the model is cut
into units.  Blocks in a `ModuleList` are what nearly all deep models have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, zeros
from torch.nn import Module, ModuleList
from torch.optim import Optimizer

from fairlead.errors import ConfigError

Key = tuple[str | int, ...]
"""Where a tensor is in a checkpoint: the keys that lead to it."""


def is_parallelised(module: Module) -> bool:
    """Whether the user's own code has sharded some part of the module already."""
    return any(isinstance(m, FSDPModule) for m in module.modules()) or any(
        isinstance(p, DTensor) for p in module.parameters()
    )


def blocks(module: Module, classes: set[type[Module]] | None) -> list[Module]:
    """The submodules that become units, innermost first; raises when the model has none of the classes.

    None takes the items of the outermost `ModuleList`s, except those that share a parameter with the rest of the model:
    a parameter can live in one unit only.
    """
    if classes is None:
        items = list(_listed(module))
        uses = _inside(module)
        return [item for item in items if all(_inside(item)[p] == uses[p] for p in map(id, item.parameters()))]
    found = [m for m in module.modules() if m is not module and isinstance(m, tuple(classes))]
    if classes and not found:
        names = sorted({type(m).__qualname__ for m in module.modules() if m is not module})
        raise ConfigError(
            f"the model has no {' or '.join(sorted(c.__qualname__ for c in classes))}",
            where="trainer.strategy.auto_wrap_policy",
            why=f"it consists of: {', '.join(names)}",
            fix="name the class of its layers, or write `auto_wrap_policy: auto`",
        )
    return found[::-1]


def _listed(module: Module) -> Iterator[Module]:
    for child in module.children():
        if isinstance(child, ModuleList):
            yield from (item for item in child if any(True for _ in item.parameters()))
        else:
            yield from _listed(child)


def _inside(module: Module) -> Counter[int]:
    return Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))


def shard(
    module: Module,
    mesh: DeviceMesh,
    device: torch.device,
    classes: set[type[Module]] | None,
    *,
    reshard_after_forward: bool,
) -> None:
    """Shards a module in place over a one-dimensional mesh; every rank starts from rank 0's values.

    Parameters on the meta device are left to be initialised later; `classes` is as for `blocks`.
    """
    units = blocks(module, classes)
    _from_rank_zero([*module.parameters(), *module.buffers()], device)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
    # The root is needed again at once for backward, so freeing it would only cost a second gather.
    fully_shard(module, mesh=mesh, reshard_after_forward=False)


@torch.no_grad()
def _from_rank_zero(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Copies the tensors of rank 0 to all ranks, one at a time so that no device must hold the whole model.

    Without it, ranks that were seeded differently would each contribute their part of a different model.
    """
    for tensor in tensors:
        if tensor.is_meta:
            continue
        there = tensor.to(device)
        dist.broadcast(there, src=0)
        if there is not tensor:
            tensor.copy_(there)


def destinations(
    model: Module, optimizers: Iterable[Optimizer]
) -> Callable[[Key, torch.Size, torch.dtype], torch.Tensor | None]:
    """Which tensor to read into, for a key in Lightning's checkpoint; see `ShardedLoads`.

    Weights are read where they are. The state of a parameter is laid out as the parameter is; what has another shape
    is held whole by each rank.
    """
    weights: dict[str, Any] = get_model_state_dict(model)
    parameters = {name: value for name, value in weights.items() if isinstance(value, DTensor)}
    count = sum(1 for _ in optimizers)

    def destination(key: Key, size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        if key[0] in ("state_dict", "model"):
            own = weights.get(str(key[1]))
            fits = isinstance(own, torch.Tensor) and own.shape == size and own.dtype == dtype
            return own if fits else None
        known = len(key) == 4 and key[1] == "state" and key[0] in {f"optimizer_{i}" for i in range(count)}
        parameter = parameters.get(str(key[2])) if known else None
        if parameter is None or (not size and parameter.ndim):
            return None
        if parameter.shape == size:
            return torch.empty_like(parameter, dtype=dtype)
        mesh = parameter.device_mesh
        return zeros(*size, dtype=dtype, device_mesh=mesh, placements=[Replicate()] * mesh.ndim)

    return destination
