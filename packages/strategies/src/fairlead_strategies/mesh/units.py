"""How a module is cut into units.

Every *unit* is gathered before its forward and freed after it, so the memory saved depends on how the model is cut
into units.  Blocks in a `ModuleList` are what nearly all deep models have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, ModuleDict, ModuleList

from fairlead.errors import ConfigError

Policy = set[type[Module]] | int | Literal["auto"]
"""What becomes a unit: modules of these classes, modules of at least so many parameters, or the items of lists."""


def is_parallelised(module: Module) -> bool:
    """Whether the user's own code has sharded some part of the module already."""
    return any(isinstance(m, FSDPModule) for m in module.modules()) or any(
        isinstance(p, DTensor) for p in module.parameters()
    )


def reshard(module: Module) -> None:
    """Frees what an evaluation has left gathered, so that the module's parameters are those that optimizers know."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def blocks(module: Module, policy: Policy) -> list[Module]:
    """The submodules that become units, innermost first; raises when the model has none of the classes.

    `auto` takes the items of the outermost `ModuleList`s. A number takes submodules from the inside out, each with so
    many parameters that are in no unit yet. Neither takes one that shares a parameter with the rest of the model: a
    parameter can live in one unit only.
    """
    if isinstance(policy, set):
        return _of_classes(module, policy)
    found = list(_listed(module)) if policy == "auto" else _large(module, policy)
    uses = _inside(module)
    return [item for item in found if all(_inside(item)[p] == uses[p] for p in map(id, item.parameters()))]


def _of_classes(module: Module, classes: set[type[Module]]) -> list[Module]:
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


def _large(module: Module, least: int) -> list[Module]:
    found: list[Module] = []

    def visit(part: Module) -> set[int]:
        """The parameters of a part that are in no unit."""
        free = {id(p) for p in part.parameters(recurse=False)}
        for child in part.children():
            free |= visit(child)
        # A container has no forward of its own, before which it could be gathered.
        container = part is module or isinstance(part, (ModuleList, ModuleDict))
        if container or sum(sizes[p] for p in free) < least:
            return free
        found.append(part)
        return set()

    sizes = {id(p): p.numel() for p in module.parameters()}
    visit(module)
    return found


def _inside(module: Module) -> Counter[int]:
    return Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
