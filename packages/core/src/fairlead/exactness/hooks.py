"""What the user's hooks do at every start, or to the data from outside: a resumed run does it at another time."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from fairlead.exactness.kinds import CALLBACKS, MODULES
from fairlead.exactness.names import place
from fairlead.exactness.reach import Reach, Unit
from fairlead.findings import Inexact

__all__ = ["changes_at_starts", "changes_from_outside"]

# They run at every start, after the weights of the checkpoint were put back.
_STARTS: Final = frozenset(("on_fit_start", "on_train_start", "on_sanity_check_start", "on_sanity_check_end"))
_DATA: Final = ("datamodule", "train_dataloader", "val_dataloaders", "dataset")
_HARMLESS: Final = frozenset(("set_epoch", "setup", "prepare_data", "teardown"))


def changes_at_starts(reach: Reach) -> Iterator[Inexact]:
    """Hooks of a start that change weights: also those that were just put back."""
    for unit in reach.units:
        owner = unit.owner
        if unit.name not in _STARTS or owner is None or not reach.classes.is_a(owner, MODULES | CALLBACKS):
            continue
        for node in ast.walk(unit.node):
            if _changes_tensors(node):
                yield Inexact(
                    f"{unit.name} of {owner.node.name} in {place(unit.module, node)}",
                    why="it runs at every start, and changes what the checkpoint has put back",
                    fix="do it in configure_model or __init__, which come before that",
                    certain=False,
                )
                break


def _changes_tensors(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method = node.func.attr
        return method == "load_state_dict" or (method.endswith("_") and not method.startswith("_"))
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(target, ast.Attribute) and target.attr == "data" for target in targets)


def changes_from_outside(reach: Reach) -> Iterator[Inexact]:
    """Code of the model and of callbacks that changes the data, and names that functions set in their module."""
    for unit in reach.units:
        node = next((n for n in ast.walk(unit.node) if unit.side == "model" and _changes_data(n)), None)
        if node is not None:
            yield _doubt(unit, node, "it changes the data, at a time that a resumed run may have passed")
        for one in ast.walk(unit.node):
            if isinstance(one, ast.Global):
                yield _doubt(unit, one, f"it sets {', '.join(one.names)} of the module, which is in no checkpoint")
                break
        for one in ast.walk(unit.node):
            if unit.side == "data" and _sets_computed(one, unit.me):
                yield _doubt(unit, one, "it sets attributes whose names are computed")
                break


def _doubt(unit: Unit, node: ast.AST, because: str) -> Inexact:
    owner = f" of {unit.owner.node.name}" if unit.owner is not None else ""
    what = f"{unit.name or 'a value'}{owner} in {place(unit.module, node)}"
    return Inexact(what, why=because, fix="make samples from their index and epoch alone", certain=False)


def _changes_data(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(isinstance(t, ast.Attribute | ast.Subscript) and _is_data(t.value) for t in targets)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        return node.value.func.attr not in _HARMLESS and _is_data(node.value.func.value)
    return False


def _is_data(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        if isinstance(node, ast.Attribute) and node.attr in _DATA:
            return True
        node = node.func if isinstance(node, ast.Call) else node.value
    return False


def _sets_computed(node: ast.AST, me: str | None) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr"):
        return False
    target = node.args[0] if node.args else None
    return not (isinstance(target, ast.Name) and target.id == me)
