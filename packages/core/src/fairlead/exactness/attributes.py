"""What the attributes of the user's objects may be."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from fairlead.exactness.classes import methods_of, self_name
from fairlead.exactness.functions import Functions, is_super
from fairlead.exactness.names import External, Global, Lost, Meaning, ModuleName, Scope, place
from fairlead.exactness.values import (
    Call,
    Constant,
    Frame,
    Instance,
    Items,
    Method,
    Named,
    Unknown,
    Value,
    Values,
    distinct,
)
from fairlead.user_code.source import Binding
from fairlead.user_code.symbols import ClassSymbol, FunctionSymbol

__all__ = ["Attributes"]

_HYPERPARAMETERS: Final = External("hparams")


class Attributes(Functions):
    """The part of the evaluator that follows attributes: `self.loaders`, `super().train_dataloader`."""

    def local(self, name: str, binding: Binding, scope: Scope, frame: Frame) -> Iterator[Value]:
        """What a statement gives a local name."""
        raise NotImplementedError

    def assigned(self, name: str, target: ast.AST, values: Values, where: str) -> Iterator[Value]:
        """The part of a value that a target such as `a, b` gives to a name."""
        raise NotImplementedError

    def with_changes(
        self, values: Values, body: ast.AST | None, is_it: Callable[[ast.expr], bool], frame: Frame
    ) -> Values:
        """Collections with what a function puts into them after they were made."""
        raise NotImplementedError

    def of_attribute(self, node: ast.Attribute, frame: Frame) -> Iterator[Value]:
        """What `value.name` in the source may be."""
        if is_super(node.value, frame):
            yield from self._inherited(node, frame)
            return
        for value in self.evaluate(node.value, frame):
            yield from self.attribute(value, node.attr, Unknown.at(frame, node, f"the attribute {node.attr}"))

    def attribute(self, value: Value, name: str, otherwise: Unknown) -> Values:
        """What `value.name` may be.

        Args:
            value: The object.
            name: The attribute.
            otherwise: What it is where that cannot be told.
        """
        if isinstance(value, Named):
            return tuple(self._of_named(value, name, otherwise))
        if isinstance(value, Instance) and isinstance(value.kind, External):
            if value.kind == _HYPERPARAMETERS:
                given = value.call.keywords.get(name)
                return given() if given is not None else (otherwise,)
            return (Named(External(f"{value.kind.name}.{name}")),)
        if isinstance(value, Instance) and isinstance(value.kind, ClassSymbol):
            return distinct(self._of_object(value, value.kind, name, otherwise))
        if isinstance(value, Items):
            return (Named(External(f"builtins.{'dict' if value.mapping else 'list'}.{name}")),)
        if isinstance(value, Constant):
            return (Constant(known=False),) if value.value is not None or not value.known else ()
        return (value if isinstance(value, Unknown) else otherwise,)

    def _of_named(self, value: Named, name: str, otherwise: Unknown) -> Iterator[Value]:
        if isinstance(value.meaning, FunctionSymbol):
            yield otherwise
        elif isinstance(value.meaning, ClassSymbol):
            found = self.classes.find(value.meaning, name)
            for owner, binding in found:
                yield from self._of_class(Instance(value.meaning, Call("", complete=False)), owner, binding, name)
            if not found:
                yield otherwise
        else:
            yield from self.meant(self.names.attribute(value.meaning, name), otherwise)

    def meant(self, meanings: Iterable[Meaning], otherwise: Unknown) -> Iterator[Value]:
        """The values of what names mean."""
        for meaning in meanings:
            if isinstance(meaning, Global):
                yield from self.evaluate(meaning.node, Frame(Scope(meaning.module)))
            elif isinstance(meaning, ClassSymbol | FunctionSymbol | External | ModuleName):
                yield Named(meaning)
            else:
                yield Unknown(meaning.why, otherwise.where) if isinstance(meaning, Lost) else otherwise

    def _of_object(self, owner: Instance, kind: ClassSymbol, name: str, otherwise: Unknown) -> Iterator[Value]:
        """Whatever any method assigns to it, what the class body has, and what a field is given."""
        found = False
        for defined_in, binding in self.classes.find(kind, name):
            found = True
            yield from self._of_class(owner, defined_in, binding, name)
        for method, target, value in self.classes.assignments(kind, name):
            found = True
            frame = self.method_frame(owner, method.defined_in, method.function)
            if value is None:
                yield Unknown.at(frame, target, f"{name} is set in a way that is not followed")
                continue
            made, where = self.evaluate(value.node, frame), place(frame.module, target)
            made = self._filled(owner, kind, name, made)
            yield from self.assigned(name, target, self.elements(made, where) if value.iterated else made, where)
        if not self.classes.find(kind, "__init__") and name in owner.call.keywords:  # a dataclass or a named tuple
            found = True
            yield from owner.call.keywords[name]()
        outside = self.names.set_from_outside(name)
        if outside is not None:
            yield Unknown(f"{name} is set from outside of {owner.name}", outside)
        if found or outside is not None:
            return
        if name == "hparams":
            yield Instance(_HYPERPARAMETERS, Call(owner.call.where, (), self.parameters(owner, kind)))
            return
        foreign = self.classes.foreign(kind)
        yield otherwise if foreign is None else Unknown(f"{name} comes from {foreign}", otherwise.where)

    def _filled(self, owner: Instance, kind: ClassSymbol, name: str, values: Values) -> Values:
        """Collections with what any method puts into them."""
        for one in self.classes.own(kind):
            for method in methods_of(one):
                me = self_name(method)
                if me is None:
                    continue
                frame = self.method_frame(owner, method.defined_in, method.function)
                values = self.with_changes(values, method.function.node, _is_attribute(me, name), frame)
        return values

    def _of_class(self, owner: Instance, defined_in: ClassSymbol, binding: Binding, name: str) -> Iterator[Value]:
        node = binding.node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            frame = Frame(Scope(defined_in.module))
            yield from self.local(name, binding, frame.scope, frame)
            return
        function = FunctionSymbol(defined_in.module, node, True)
        kinds = self.decorators(function)
        if kinds & {"builtins.property", "functools.cached_property"}:
            yield from self.returned(function, self.method_frame(owner, defined_in, function))
        elif "builtins.staticmethod" in kinds:
            yield Named(FunctionSymbol(defined_in.module, node))
        else:
            yield Method(function, owner, defined_in)

    def _inherited(self, node: ast.Attribute, frame: Frame) -> Iterator[Value]:
        """`super().name`."""
        owner, after = frame.owner, frame.after
        if owner is None or after is None or not isinstance(owner.kind, ClassSymbol):
            yield Unknown.at(frame, node, "super() outside of a method")
            return
        found = self.classes.find(owner.kind, node.attr, after=after)
        for defined_in, binding in found:
            yield from self._of_class(owner, defined_in, binding, node.attr)
        foreign = self.classes.foreign(owner.kind)
        if not found:
            yield Unknown.at(frame, node, f"{node.attr} comes from {foreign}" if foreign else f"no {node.attr}")


def _is_attribute(me: str, name: str) -> Callable[[ast.expr], bool]:
    def is_it(node: ast.expr) -> bool:
        return (
            isinstance(node, ast.Attribute)
            and node.attr == name
            and isinstance(node.value, ast.Name)
            and node.value.id == me
        )

    return is_it
