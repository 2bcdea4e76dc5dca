"""How a module that does not parallelise itself is sharded: its blocks, then what is left.

Every *unit* is gathered before its forward and freed after it, so the memory saved depends on how
the model is cut into units.  Blocks in a `ModuleList` are what nearly all deep models consist of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Module, ModuleList

from fairlead.errors import ConfigError

__all__ = ["blocks", "is_parallelised", "shard"]


def is_parallelised(module: Module) -> bool:
    """Whether the user's own code has sharded some part of the module already."""
    return any(isinstance(m, FSDPModule) for m in module.modules()) or any(
        isinstance(p, DTensor) for p in module.parameters()
    )


def blocks(module: Module, classes: set[type[Module]] | None) -> list[Module]:
    """The submodules that become units, innermost first.

    Args:
        module: The whole model.
        classes: Which classes; None takes the items of the outermost `ModuleList`s, except those
            that share a parameter with the rest of the model: a parameter can live in one unit only.

    Raises:
        ConfigError: The model has no submodule of those classes.
    """
    if classes is None:
        items = list(_listed(module))
        places = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
        return [item for item in items if all(_inside(item)[p] == places[p] for p in map(id, item.parameters()))]
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
    *,
    classes: set[type[Module]] | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Shards a module in place over a one-dimensional mesh; every rank starts from rank 0's values.

    Args:
        module: The model; parameters on the meta device are left to be initialised later.
        mesh: The ranks that share the shards.
        device: This rank's device.
        classes: As for `blocks`.
        reshard_after_forward: Free the units after their forward.

    Raises:
        ConfigError: As `blocks` does.
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
