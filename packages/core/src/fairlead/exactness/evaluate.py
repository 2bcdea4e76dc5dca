"""Follows an expression of the user's to what it makes: through functions, methods, attributes and branches."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from fairlead.exactness.attributes import Attributes
from fairlead.exactness.changes import changed, changes
from fairlead.exactness.names import External, Names, Scope, place
from fairlead.exactness.values import (
    Call,
    Constant,
    Frame,
    Instance,
    Items,
    Named,
    Unknown,
    Value,
    Values,
    distinct,
    truth,
)
from fairlead.user_code.source import Binding
from fairlead.user_code.symbols import ClassSymbol, FunctionSymbol

__all__ = ["Evaluator"]

_MAX_STEPS: Final = 20_000
_MAX_DEPTH: Final = 50
_COUNTS: Final = frozenset(("builtins.range", "builtins.enumerate"))


class Evaluator(Attributes):
    """Evaluates expressions without running them; what it cannot follow is `Unknown`, with the reason.

    Args:
        names: What names mean.
    """

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        self._steps = 0
        self._open: list[tuple[int, int]] = []

    def evaluate(self, node: ast.expr, frame: Frame) -> Values:
        """All that an expression may be."""
        key = (id(node), id(frame))
        self._steps += 1
        if key in self._open:
            return ()  # a value that is made from itself adds nothing
        if self._steps > _MAX_STEPS or len(self._open) > _MAX_DEPTH:
            return (Unknown.at(frame, node, "it is made in too many steps to follow"),)
        self._open.append(key)
        try:
            return distinct(self._expression(node, frame))
        finally:
            self._open.pop()

    def _expression(self, node: ast.expr, frame: Frame) -> Iterator[Value]:
        if isinstance(node, ast.Constant):
            yield Constant(node.value)
        elif isinstance(node, ast.Name):
            yield from self._name(node, frame)
        elif isinstance(node, ast.Attribute):
            yield from self.of_attribute(node, frame)
        elif isinstance(node, ast.Call):
            call = self.call_of(node, frame)
            for callee in self.evaluate(node.func, frame):
                yield from self.called(callee, call, frame, node)
        elif isinstance(node, ast.List | ast.Tuple | ast.Set):
            yield self._items(node.elts, frame)
        elif isinstance(node, ast.Dict):
            yield self._mapping(node, frame)
        elif isinstance(node, ast.IfExp):
            decided = truth(self.evaluate(node.test, frame))
            yield from self.evaluate(node.body, frame) if decided is not False else ()
            yield from self.evaluate(node.orelse, frame) if decided is not True else ()
        elif isinstance(node, ast.BoolOp):
            for part in node.values:
                yield from self.evaluate(part, frame)
        elif isinstance(node, ast.NamedExpr):
            yield from self.evaluate(node.value, frame)
        elif isinstance(node, ast.Subscript):
            yield from self._subscript(node, frame)
        elif isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp):
            yield Items((self.evaluate(node.elt, frame),), (None,), whole=False)
        elif isinstance(node, ast.DictComp):
            yield Items((self.evaluate(node.value, frame),), (None,), mapping=True, whole=False)
        elif isinstance(node, ast.Lambda):
            yield Named(FunctionSymbol(frame.module, node), frame)
        elif isinstance(node, ast.BinOp):
            yield from self._operated(node, frame)
        elif isinstance(node, ast.UnaryOp | ast.Compare | ast.JoinedStr):
            yield Constant(known=False)
        else:
            yield Unknown.at(frame, node, f"a {type(node).__name__} expression is not followed")

    def _operated(self, node: ast.BinOp, frame: Frame) -> Iterator[Value]:
        parts = [*self.evaluate(node.left, frame), *self.evaluate(node.right, frame)]
        lost = [part for part in parts if isinstance(part, Unknown)]
        if isinstance(node.op, ast.Add) and not all(isinstance(part, Constant) for part in parts):
            yield from parts  # lists, or datasets: the sum holds both
        else:
            yield from lost or (Constant(known=False),)

    def _items(self, nodes: Iterable[ast.expr], frame: Frame) -> Items:
        values: list[Values] = []
        whole = True
        for node in nodes:
            if isinstance(node, ast.Starred):
                whole = False
                values.append(self.elements(self.evaluate(node.value, frame), place(frame.module, node)))
            else:
                values.append(self.evaluate(node, frame))
        return Items(tuple(values), tuple(range(len(values))), whole=whole)

    def _mapping(self, node: ast.Dict, frame: Frame) -> Items:
        values: list[Values] = []
        keys: list[object] = []
        whole = True
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                values.append(self.evaluate(value, frame))
                keys.append(key.value if isinstance(key, ast.Constant) else None)
                whole = whole and isinstance(key, ast.Constant)
                continue
            for one in self.evaluate(value, frame):  # {**other}
                known = isinstance(one, Items) and one.mapping
                whole = whole and known and isinstance(one, Items) and one.whole
                if isinstance(one, Items) and known:
                    values += one.values
                    keys += one.keys
        return Items(tuple(values), tuple(keys), mapping=True, whole=whole)

    def _subscript(self, node: ast.Subscript, frame: Frame) -> Iterator[Value]:
        index = node.slice.value if isinstance(node.slice, ast.Constant) else None
        for value in self.evaluate(node.value, frame):
            if isinstance(value, Items):
                exact = [v for k, v in zip(value.keys, value.values, strict=True) if index is not None and k == index]
                yield from exact[-1] if exact else value
                if not value.whole and not list(value):
                    yield Unknown.at(frame, node, "an item of a collection that is not written out")
            elif isinstance(value, Instance) and isinstance(value.kind, External):
                yield Instance(External(f"{value.kind.name}[]"), Call(place(frame.module, node)))
            elif isinstance(value, Named) and isinstance(value.meaning, External | ClassSymbol):
                yield value  # Generic[T]
            elif isinstance(value, Constant):
                yield Constant(known=False)
            else:
                yield value if isinstance(value, Unknown) else Unknown.at(frame, node, "an item of an object")

    def elements(self, values: Values, where: str) -> Values:
        """What may come out of iterating."""
        found: list[Value] = []
        for value in values:
            if isinstance(value, Items):
                found += [Constant(known=False)] if value.mapping else list(value)
            elif isinstance(value, Constant) or _counts(value):
                found.append(Constant(known=False))
            else:
                found.append(value if isinstance(value, Unknown) else Unknown("what an object iterates over", where))
        return tuple(found)

    # -- names

    def _name(self, node: ast.Name, frame: Frame) -> Iterator[Value]:
        current: Frame | None = frame
        while current is not None:
            scope = current.scope
            bindings, given = scope.names.get(node.id, []), current.arguments.get(node.id)
            if node.id in scope.parameters:
                why = f"{node.id} is an argument that its caller gives"
                yield from given() if given is not None else (Unknown.at(frame, node, why),)
            for binding in bindings:
                yield from self.local(node.id, binding, scope, current)
            if bindings or node.id in scope.parameters:
                return
            current = current.outer
        found = self.names.top_level(frame.module, node.id)
        yield from self.meant(found, Unknown.at(frame, node, node.id))

    def local(self, name: str, binding: Binding, scope: Scope, frame: Frame) -> Iterator[Value]:
        """What a statement gives a local name."""
        node = binding.node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Named(FunctionSymbol(scope.module, node), frame)
        elif isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef):
            yield from self.meant(self.names.bound(scope.module, binding, name), Unknown(name))
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            if node.value is not None:
                values, where = self.evaluate(node.value, frame), place(scope.module, node)
                values = self.with_changes(values, scope.node, lambda it: _is_name(it, name), frame)
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    yield from self.assigned(name, target, values, where)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            where = place(scope.module, node.target)
            yield from self.assigned(name, node.target, self.elements(self.evaluate(node.iter, frame), where), where)
        elif isinstance(node, ast.AugAssign):
            yield from self.evaluate(node.value, frame)
        elif not isinstance(node, ast.Delete):
            yield Unknown.at(frame, node, f"{name} is set in a way that is not followed")

    def with_changes(
        self, values: Values, body: ast.AST | None, is_it: Callable[[ast.expr], bool], frame: Frame
    ) -> Values:
        """Collections with what a function puts into them after they were made."""
        if body is None or not any(isinstance(value, Items) for value in values):
            return values
        made = list(changes(body, is_it))
        where = place(frame.module, body)
        return tuple(
            changed(
                one,
                made,
                lambda node: self.evaluate(node, frame),
                lambda given: self.elements(given, where),
            )
            if isinstance(one, Items) and made
            else one
            for one in values
        )

    def assigned(self, name: str, target: ast.AST, values: Values, where: str) -> Iterator[Value]:
        """The part of a value that a target such as `a, b` gives to a name."""
        if isinstance(target, ast.Name | ast.Attribute):
            if (target.id if isinstance(target, ast.Name) else target.attr) == name:
                yield from values
        elif isinstance(target, ast.Starred):
            yield from self.assigned(name, target.value, (Items((values,), (None,), whole=False),), where)
        elif isinstance(target, ast.Tuple | ast.List):
            plain = not any(isinstance(one, ast.Starred) for one in target.elts)
            for number, one in enumerate(target.elts):
                for value in values:
                    exact = plain and isinstance(value, Items) and value.whole and not value.mapping
                    if exact and isinstance(value, Items) and number < len(value.values):
                        yield from self.assigned(name, one, value.values[number], where)
                    else:
                        yield from self.assigned(name, one, self.elements((value,), where), where)


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _counts(value: Value) -> bool:
    return isinstance(value, Instance) and isinstance(value.kind, External) and value.kind.name in _COUNTS
