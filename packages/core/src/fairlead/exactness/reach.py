"""The parts of the user's code that a fit runs: found by following the names that they use."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from fairlead.exactness.classes import Classes, methods_of, self_name
from fairlead.exactness.kinds import is_known
from fairlead.exactness.names import External, Global, Lost, Meaning, Names, Scope, place
from fairlead.user_code.source import ModuleFile
from fairlead.user_code.symbols import ClassSymbol, FunctionSymbol

__all__ = ["Reach", "Side", "Unit", "Use", "references"]

Side = Literal["data", "model"]
"""Whether a part makes samples and batches, or computes with them."""

_NOT_IN_A_FIT: Final = ("test_", "predict_", "on_test_", "on_predict_")
_DATA_HOOKS: Final = frozenset(("prepare_data", "setup", "train_dataloader", "val_dataloader"))
_MAX_UNITS: Final = 2_000


@dataclass(frozen=True, eq=False)
class Unit:
    """A function, a method or a value that a module computes.

    Attributes:
        module: Where it is.
        node: Its syntax.
        scope: Its names.
        side: What it is used for.
        owner: The class whose body has it, if it is in one.
    """

    module: ModuleFile
    node: ast.AST
    scope: Scope
    side: Side
    owner: ClassSymbol | None = None

    @property
    def name(self) -> str:
        """The name of the function; empty for a value."""
        return self.node.name if isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef) else ""

    @property
    def me(self) -> str | None:
        """What a method calls its object."""
        if self.owner is None or not isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        first = next(iter([*self.node.args.posonlyargs, *self.node.args.args]), None)
        return first.arg if first is not None else None

    @cached_property
    def references(self) -> list[tuple[ast.expr, Scope]]:
        """The names that it reads, each with the scope that it is in."""
        return list(references(self.node, self.scope))

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node above each node."""
        return {child: node for node in ast.walk(self.node) for child in ast.iter_child_nodes(node)}

    @property
    def where(self) -> str:
        """`data.py:12`."""
        return place(self.module, self.node)


@dataclass(frozen=True, eq=False)
class Use:
    """A name of a package's that a unit uses."""

    unit: Unit
    name: str
    node: ast.expr


class Reach:
    """Collects units, beginning at the classes and functions of the job.

    Args:
        names: What names mean.
        classes: The user's classes.

    Attributes:
        units: The units, each once for each side.
        uses: What they use of packages.
        complete: False when there was more than is looked at.
    """

    def __init__(self, names: Names, classes: Classes) -> None:
        self.names, self.classes = names, classes
        self.units: list[Unit] = []
        self.uses: list[Use] = []
        self.complete = True
        self._waiting: list[Unit] = []
        self._seen: set[tuple[int, Side]] = set()
        self._classes: set[tuple[int, Side]] = set()

    def add(self, meaning: Meaning, side: Side, *, gives_data: bool = False) -> None:
        """A beginning.

        Args:
            meaning: A class or a function.
            side: What it is used for.
            gives_data: Whether the hooks for data of a model count, since there is no datamodule.
        """
        if isinstance(meaning, ClassSymbol):
            self._class(meaning, side, gives_data=gives_data)
        elif isinstance(meaning, FunctionSymbol):
            self._function(meaning, side)
        elif isinstance(meaning, Global):
            self._unit(Unit(meaning.module, meaning.node, Scope(meaning.module), side))
        self._work()

    def _function(self, function: FunctionSymbol, side: Side, owner: ClassSymbol | None = None) -> None:
        if (id(function.node), side) not in self._seen:
            self._unit(Unit(function.module, function.node, Scope(function.module, function.node), side, owner))

    def _class(self, cls: ClassSymbol, side: Side, *, gives_data: bool = False) -> None:
        if (id(cls.node), side) in self._classes:
            return
        self._classes.add((id(cls.node), side))
        for one in self.classes.own(cls):
            data = _data_methods(one) if gives_data else frozenset[str]()
            for method in methods_of(one):
                if not method.name.startswith(_NOT_IN_A_FIT):
                    function = method.function
                    its: Side = "data" if method.name in data else side
                    self._function(function, its, one)
            for statement in one.node.body:
                if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                    self._unit(Unit(one.module, statement, Scope(one.module), side, one))
            for base in (one.node.bases, *[[keyword.value] for keyword in one.node.keywords]):
                for node in base:
                    self._unit(Unit(one.module, node, Scope(one.module), side))

    def _unit(self, unit: Unit) -> None:
        key = (id(unit.node), unit.side)
        if key in self._seen:
            return
        if len(self._seen) >= _MAX_UNITS:
            self.complete = False
            return
        self._seen.add(key)
        self.units.append(unit)
        self._waiting.append(unit)

    def _work(self) -> None:
        while self._waiting:
            unit = self._waiting.pop()
            for node, scope in unit.references:
                parts: list[ast.expr] = [node]
                while isinstance(parts[-1], ast.Attribute):  # of `RNG.random` the value RNG is used as well
                    parts.append(parts[-1].value)
                for part in reversed(parts):
                    for meaning in self.names.expression(scope, part):
                        if part is node or not isinstance(meaning, External):
                            self._found(meaning, unit, part)

    def _found(self, meaning: Meaning, unit: Unit, node: ast.expr) -> None:
        if isinstance(meaning, External):
            self.uses.append(Use(unit, meaning.name, node))
        elif isinstance(meaning, ClassSymbol):
            self._class(meaning, unit.side)
        elif isinstance(meaning, FunctionSymbol):
            self._function(meaning, unit.side)
        elif isinstance(meaning, Global):
            self._unit(Unit(meaning.module, meaning.node, Scope(meaning.module), unit.side))
        elif isinstance(meaning, Lost):
            return  # a local value, or a name that only the run can tell

    def strange(self, side: Side) -> Iterator[Use]:
        """Uses of packages that may keep random generators of their own, the first of each package."""
        seen: set[str] = set()
        for use in self.uses:
            top = use.name.partition(".")[0]
            if use.unit.side == side and top not in seen and not is_known(use.name, sys.stdlib_module_names):
                seen.add(top)
                yield use


def references(node: ast.AST, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
    """The names and dotted names that code reads, each with the scope that it is in; annotations are left out."""
    stack: list[tuple[ast.AST, Scope]] = [(node, scope)]
    while stack:
        one, inside = stack.pop()
        if isinstance(one, ast.Attribute | ast.Name):
            root: ast.AST = one
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name):
                if isinstance(one.ctx, ast.Load) or isinstance(one, ast.Attribute):
                    yield one, inside
                continue
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner = inside if one is scope.node else Scope(scope.module, one, inside)
            parts: list[ast.AST] = [*one.args.defaults, *(d for d in one.args.kw_defaults if d is not None)]
            if isinstance(one, ast.Lambda):
                stack.append((one.body, inner))
            else:
                stack.extend((part, inner) for part in one.body)
                parts += one.decorator_list
            stack.extend((part, inside) for part in parts)
            continue
        if isinstance(one, ast.AnnAssign):
            stack.extend((part, inside) for part in (one.target, one.value) if part is not None)
            continue
        stack.extend((child, inside) for child in ast.iter_child_nodes(one))


def _data_methods(cls: ClassSymbol) -> frozenset[str]:
    """The hooks for data, and the methods of the class that they call."""
    methods = {method.name: method for method in methods_of(cls)}
    found: set[str] = set()
    waiting = [name for name in methods if name in _DATA_HOOKS]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        me = self_name(methods[name])
        waiting += [
            node.attr
            for node in ast.walk(methods[name].function.node)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == me
            and node.attr in methods
        ]
    return frozenset(found)
