"""The user's classes: their bases, methods, and what their methods assign to `self`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from fairlead.exactness.names import External, Lost, Names, Scope
from fairlead.user_code.source import Binding
from fairlead.user_code.symbols import ClassSymbol, FunctionSymbol

__all__ = ["Assigned", "Classes", "MethodOf", "methods_of", "self_name"]

_PLAIN_BASES: Final = ("builtins.object", "typing.", "abc.", "collections.abc.", "builtins.", "enum.")


@dataclass(frozen=True)
class MethodOf:
    """A method and the class whose body has it."""

    function: FunctionSymbol
    defined_in: ClassSymbol

    @property
    def name(self) -> str:
        """The method's name."""
        node = self.function.node
        return "" if isinstance(node, ast.Lambda) else node.name


@dataclass(frozen=True)
class Assigned:
    """A value that a statement assigns; `iterated`: an item of it, as in a loop."""

    node: ast.expr
    iterated: bool = False


def methods_of(cls: ClassSymbol) -> Iterator[MethodOf]:
    """The methods that a class body has itself."""
    for bindings in cls.own.values():
        for binding in bindings:
            if isinstance(binding.node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield MethodOf(FunctionSymbol(cls.module, binding.node, True), cls)


def self_name(method: MethodOf) -> str | None:
    """What a method calls its object."""
    arguments = method.function.node.args
    first = next(iter([*arguments.posonlyargs, *arguments.args]), None)
    return first.arg if first is not None else None


class Classes:
    """What is known of the user's classes.

    Args:
        names: What names mean.
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self._orders: dict[int, list[ClassSymbol | External | Lost]] = {}
        self._keep: list[ClassSymbol] = []

    def order(self, cls: ClassSymbol) -> list[ClassSymbol | External | Lost]:
        """The class and its ancestors: depth first, each where it comes last, as Python but for oddities."""
        if id(cls.node) not in self._orders:
            self._keep.append(cls)
            self._orders[id(cls.node)] = [cls]  # for a class that derives from itself
            found: list[ClassSymbol | External | Lost] = [cls]
            for base in cls.node.bases:
                for meaning in self._base(cls, base):
                    found += self.order(meaning) if isinstance(meaning, ClassSymbol) else [meaning]
            self._orders[id(cls.node)] = [one for i, one in enumerate(found) if one not in found[i + 1 :]]
        return self._orders[id(cls.node)]

    def _base(self, cls: ClassSymbol, base: ast.expr) -> Iterator[ClassSymbol | External | Lost]:
        while isinstance(base, ast.Subscript):  # Dataset[int]
            base = base.value
        for meaning in self._names.expression(Scope(cls.module), base):
            if isinstance(meaning, ClassSymbol | External):
                yield meaning
            else:
                yield Lost(f"a base class of {cls.node.name} cannot be read")

    def own(self, cls: ClassSymbol) -> list[ClassSymbol]:
        """The class and those of its ancestors that are the user's."""
        return [one for one in self.order(cls) if isinstance(one, ClassSymbol)]

    def is_a(self, cls: ClassSymbol, names: frozenset[str]) -> bool:
        """Whether an ancestor has one of these full names."""
        return any(isinstance(one, External) and one.name in names for one in self.order(cls))

    def foreign(self, cls: ClassSymbol, but: Callable[[str], bool] = lambda name: False) -> str | None:
        """The first ancestor whose source is not read, or None.

        Args:
            cls: The class.
            but: Which full names do not count.
        """
        for one in self.order(cls):
            if isinstance(one, External) and not one.name.startswith(_PLAIN_BASES) and not but(one.name):
                return one.name
            if isinstance(one, Lost):
                return "a class that cannot be read"
        return None

    def find(self, cls: ClassSymbol, name: str, after: ClassSymbol | None = None) -> list[tuple[ClassSymbol, Binding]]:
        """What the first class that has the name binds it to; after a class, as `super()` looks."""
        own = self.own(cls)
        if after is not None and after in own:
            own = own[own.index(after) + 1 :]
        for one in own:
            if name in one.own:
                bindings = [
                    b for b in one.own[name] if not (isinstance(b.node, ast.AnnAssign) and b.node.value is None)
                ]
                last = max((i for i, b in enumerate(bindings) if not b.conditional), default=0)
                if bindings:
                    return [(one, b) for b in bindings[last:]]
        return []

    def has(self, cls: ClassSymbol, *methods: str) -> bool:
        """Whether the user's own classes define all of these methods."""
        return all(self.find(cls, name) for name in methods)

    def assignments(self, cls: ClassSymbol, name: str) -> Iterator[tuple[MethodOf, ast.AST, Assigned | None]]:
        """Each `self.name = ...` of any method: the method, the target, and what is assigned (None: not plain)."""
        for one in self.own(cls):
            for method in methods_of(one):
                me = self_name(method)
                if me is not None:
                    yield from _in_method(method, me, name)


def _in_method(method: MethodOf, me: str, name: str) -> Iterator[tuple[MethodOf, ast.AST, Assigned | None]]:
    for node in ast.walk(method.function.node):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = Assigned(node.value) if node.value is not None else None
            if value is None:
                continue  # a bare annotation
        elif isinstance(node, ast.For | ast.AsyncFor):
            targets, value = [node.target], Assigned(node.iter, iterated=True)
        elif isinstance(node, ast.With | ast.AsyncWith):
            targets = [item.optional_vars for item in node.items if item.optional_vars is not None]
            value = None
        elif _sets(node, me, name):
            yield method, node, None
            continue
        else:
            continue
        for target in targets:
            if any(_is_attribute(one, me, name) for one in ast.walk(target)):
                yield method, target, value


def _is_attribute(node: ast.AST, me: str, name: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == me
    )


def _sets(node: ast.AST, me: str, name: str) -> bool:
    """`setattr(self, x, ...)` and `self.__dict__.update(...)`, which may set any name."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name) and node.func.id == "setattr" and len(node.args) == 3:
        target, key = node.args[0], node.args[1]
        mine = isinstance(target, ast.Name) and target.id == me
        return mine and not (isinstance(key, ast.Constant) and key.value != name)
    return isinstance(node.func, ast.Attribute) and ast.unparse(node.func).startswith(f"{me}.__dict__.")
