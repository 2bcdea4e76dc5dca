"""Values that the user's objects change from step to step, and that are in no checkpoint."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from fairlead.exactness.classes import Classes, methods_of, self_name
from fairlead.exactness.kinds import CALLBACKS, ITERABLE_DATASETS, MAP_DATASETS, MODULES, OPTIMIZERS
from fairlead.exactness.names import External, Names, Scope, place
from fairlead.exactness.reach import Reach
from fairlead.findings import Inexact
from fairlead.user_code.symbols import ClassSymbol

__all__ = ["unsaved_state"]

_SAVING: Final = ("state_dict", "on_save_checkpoint", "get_extra_state", "__getstate__")
_SAMPLING: Final = ("__getitem__", "__getitems__")
_PLAIN: Final = frozenset(
    [
        *(f"builtins.{name}" for name in ("list", "dict", "set", "int", "float", "bool", "str")),
        *(f"collections.{name}" for name in ("deque", "defaultdict", "Counter", "OrderedDict")),
        *(f"torch.{name}" for name in ("zeros", "ones", "tensor", "full", "empty", "as_tensor")),
        *(f"numpy.{name}" for name in ("zeros", "ones", "array", "full", "empty")),
    ]
)
_CHANGING: Final = frozenset(
    ("append", "appendleft", "add", "extend", "insert", "update", "pop", "popleft", "setdefault", "clear")
)
# What runs once, and what begins anew when a validation is run again.
_NOT_TRAINING: Final = (
    *("__init__", "setup", "prepare_data", "configure_", "validation_", "test_", "predict_", "on_test", "on_predict"),
    *("on_validation", "on_fit_start", "on_train_start", "on_fit_end", "on_train_end", "on_sanity", "teardown"),
    *("train_dataloader", "val_dataloader"),
)


def unsaved_state(reach: Reach) -> Iterator[Inexact]:
    """The attributes of models, callbacks, optimizers and datasets whose values a resumed run has lost.

    Whether they matter cannot be told: a list of losses for a plot does not, a moving average does.
    """
    classes = reach.classes
    for cls in {id(unit.owner): unit.owner for unit in reach.units if unit.owner is not None}.values():
        module = classes.is_a(cls, MODULES)
        if module or classes.is_a(cls, CALLBACKS | OPTIMIZERS):
            if any(classes.has(cls, name) for name in _SAVING):
                continue
            for name, where, method in _changed(cls, reach.names, classes):
                keep = "register_buffer, or on_save_checkpoint and on_load_checkpoint"
                yield Inexact(
                    f"{name} of {cls.node.name} in {where}",
                    why=f"{method} changes it, and it is in no checkpoint",
                    fix=f"keep it with {keep if module else 'state_dict and load_state_dict'}, if it matters",
                    certain=False,
                )
        elif classes.is_a(cls, MAP_DATASETS | ITERABLE_DATASETS) or classes.has(cls, "__getitem__"):
            yield from _counted(cls)


def _changed(cls: ClassSymbol, names: Names, classes: Classes) -> Iterator[tuple[str, str, str]]:
    """Attributes that begin as plain values and that a method of the training changes."""
    begun = _begun(cls, names, classes)
    for method in methods_of(cls):
        me = self_name(method)
        if me is None or method.name.startswith(_NOT_TRAINING):
            continue
        for node in ast.walk(method.function.node):
            name = _changing(node, me)
            if name in begun:
                yield f"{me}.{name}", place(cls.module, node), method.name
                begun.discard(name)


def _begun(cls: ClassSymbol, names: Names, classes: Classes) -> set[str]:
    """Attributes that `__init__` sets to plain values, and buffers that are not saved."""
    found: set[str] = set()
    for owner, binding in classes.find(cls, "__init__"):
        for node in ast.walk(binding.node):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if _plain(node.value, owner, names):
                    found |= {target.attr for target in targets if isinstance(target, ast.Attribute)}
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("register_buffer") and node.args:
                name = node.args[0]
                kept = [keyword.value for keyword in node.keywords if keyword.arg == "persistent"] + node.args[2:3]
                if kept and isinstance(name, ast.Constant) and ast.unparse(kept[0]) != "True":
                    found.add(str(name.value))
    return found


def _plain(value: ast.expr, cls: ClassSymbol, names: Names) -> bool:
    if isinstance(value, ast.Constant | ast.List | ast.Dict | ast.Set | ast.Tuple | ast.UnaryOp | ast.ListComp):
        return True
    if not isinstance(value, ast.Call):
        return False
    meanings = names.expression(Scope(cls.module), value.func)
    return any(isinstance(one, External) and one.name in _PLAIN for one in meanings)


def _changing(node: ast.AST, me: str) -> str | None:
    """The attribute of the object that a node changes, depending on what it was."""
    if isinstance(node, ast.AugAssign):
        inner = node.target.value if isinstance(node.target, ast.Subscript) else node.target
        return _attribute(inner, me)
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and (name := _attribute(target.value, me)):
                return name
            name = _attribute(target, me)
            if name and any(_attribute(inner, me) == name for inner in ast.walk(node.value)):
                return name
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    method = node.func.attr
    in_place = method.endswith("_") and not method.startswith("_")  # of a tensor: add_, copy_
    return _attribute(node.func.value, me) if method in _CHANGING or in_place else None


def _attribute(node: ast.AST, me: str) -> str | None:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == me:
        return node.attr
    return None


def _counted(cls: ClassSymbol) -> Iterator[Inexact]:
    """A dataset that counts, or takes the next of something: a sample then depends on those before it."""
    for method in methods_of(cls):
        me = self_name(method)
        if me is None:
            continue
        for node in ast.walk(method.function.node):
            if (method.name in _SAMPLING and _counts(node, me)) or _keeps_iterator(node, me):
                yield Inexact(
                    f"{method.name} of {cls.node.name} in {place(cls.module, node)}",
                    why="a sample may depend on those that were made before it",
                    fix="make a sample from its index alone",
                    certain=False,
                )
                return


def _counts(node: ast.AST, me: str) -> bool:
    return isinstance(node, ast.AugAssign) and _attribute(node.target, me) is not None


def _keeps_iterator(node: ast.AST, me: str) -> bool:
    """`self.it = iter(...)`, and `next(self.it)`."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
        return node.value.func.id == "iter" and any(_attribute(target, me) for target in node.targets)
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "next"
    return called and isinstance(node, ast.Call) and bool(node.args) and _attribute(node.args[0], me) is not None
