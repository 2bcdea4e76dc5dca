"""What an expression of the user's may be at run time, as far as its source tells."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from fairlead.exactness.names import External, ModuleName, Scope, place
from fairlead.user_code.source import ModuleFile
from fairlead.user_code.symbols import ClassSymbol, FunctionSymbol

__all__ = [
    "Call",
    "Constant",
    "Frame",
    "Instance",
    "Items",
    "Method",
    "Named",
    "Partial",
    "Thunk",
    "Unknown",
    "Value",
    "Values",
    "distinct",
    "truth",
]


@dataclass(frozen=True, eq=False)
class Frame:
    """Where an expression is evaluated.

    Args:
        scope: The names of the function.
        arguments: What its parameters are; a parameter that is not here cannot be known.
        owner: The object that the function is a method of.
        after: The class after which `super()` looks.
        outer: The frame around a nested function.
    """

    scope: Scope
    arguments: Mapping[str, Thunk] = field(default_factory=dict)
    owner: Instance | None = None
    after: ClassSymbol | None = None
    outer: Frame | None = None

    @property
    def module(self) -> ModuleFile:
        """The module of the function."""
        return self.scope.module


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of a call, evaluated when they are asked for.

    Args:
        where: `data.py:12`.
        positional: By position.
        keywords: By name.
        complete: False with `*args` or `**kwargs` that cannot be read.
    """

    where: str
    positional: tuple[Thunk, ...] = ()
    keywords: Mapping[str, Thunk] = field(default_factory=dict)
    complete: bool = True

    def bind(self, *names: str) -> dict[str, Thunk]:
        """The arguments by the names of the parameters."""
        return {**dict(zip(names, self.positional, strict=False)), **self.keywords}


@dataclass(frozen=True, eq=False)
class Instance:
    """An object: what makes it, and with which arguments."""

    kind: ClassSymbol | External
    call: Call

    @property
    def name(self) -> str:
        """The name of its class."""
        return self.kind.last if isinstance(self.kind, External) else self.kind.node.name


@dataclass(frozen=True, eq=False)
class Items:
    """A list, a tuple or a mapping. `keys` has one entry for each item; `whole` is False where some may be missing."""

    values: tuple[Values, ...]
    keys: tuple[object, ...]
    mapping: bool = False
    whole: bool = True

    def __iter__(self) -> Iterator[Value]:
        for values in self.values:
            yield from values


@dataclass(frozen=True, eq=False)
class Constant:
    """A number, a text, None; `known` is False where only that much is known, and that it is not None."""

    value: object = None
    known: bool = True


@dataclass(frozen=True, eq=False)
class Named:
    """A class, a function or a module, not yet called; a nested function or lambda has its `frame`."""

    meaning: ClassSymbol | FunctionSymbol | External | ModuleName
    frame: Frame | None = None


@dataclass(frozen=True, eq=False)
class Method:
    """A method of an object."""

    function: FunctionSymbol
    owner: Instance
    defined_in: ClassSymbol


@dataclass(frozen=True, eq=False)
class Partial:
    """`functools.partial(callee, ...)`."""

    callee: Value
    call: Call


@dataclass(frozen=True, eq=False)
class Unknown:
    """What cannot be told, and why."""

    why: str
    where: str | None = None

    @classmethod
    def at(cls, frame: Frame, node: ast.AST, why: str) -> Unknown:
        """With the place of a node."""
        return cls(why, place(frame.module, node))


Value = Instance | Items | Constant | Named | Method | Partial | Unknown
Values = tuple[Value, ...]
"""All that an expression may be: each branch and each assignment adds to it."""
Thunk = Callable[[], Values]
"""A value that is worked out when it is asked for."""


def truth(values: Values) -> bool | None:
    """Whether a test is true; None unless all that it may be is known and agrees."""
    found = {bool(one.value) if isinstance(one, Constant) and one.known else None for one in values}
    return found.pop() if len(found) == 1 else None


def distinct(values: Iterator[Value] | Values) -> Values:
    """The values, each once."""
    found: list[Value] = []
    for value in values:
        if not any(one is value for one in found):
            found.append(value)
    return tuple(found)
