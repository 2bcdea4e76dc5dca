"""Calls: which function runs, what its parameters are, and what it returns."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Final

from fairlead.exactness.classes import Classes
from fairlead.exactness.names import External, Names, Scope, place
from fairlead.exactness.values import (
    Call,
    Constant,
    Frame,
    Instance,
    Items,
    Method,
    Named,
    Partial,
    Thunk,
    Unknown,
    Value,
    Values,
)
from fairlead.user_code.symbols import ClassSymbol, FunctionSymbol

__all__ = ["HARMLESS", "Functions", "is_super", "own_nodes"]

_PASSED_ON: Final = {
    "copy.copy": 0,
    "copy.deepcopy": 0,
    "typing.cast": 1,
    "typing.assert_type": 0,
    "builtins.iter": 0,
}
"""Functions that give back one of their arguments, by its position."""
_SEQUENCES: Final = frozenset(
    ("builtins.list", "builtins.tuple", "builtins.sorted", "builtins.reversed", "builtins.set")
)
_NUMBERS: Final = frozenset(
    f"builtins.{name}"
    for name in (
        "abs",
        "bool",
        "float",
        "format",
        "hash",
        "int",
        "isinstance",
        "issubclass",
        "len",
        "max",
        "min",
        "pow",
    )
) | {"builtins.repr", "builtins.round", "builtins.str", "builtins.sum", "builtins.callable", "builtins.hasattr"}
_SPLITS: Final = frozenset(
    ("torch.utils.data.random_split", "torch.utils.data.dataset.random_split", "fairlead_distributed.seeded_split")
)
_DYNAMIC: Final = frozenset(
    f"builtins.{name}" for name in ("eval", "exec", "getattr", "__import__", "globals", "vars", "super", "next")
)

HARMLESS: Final = frozenset(
    [
        *("builtins.classmethod", "builtins.staticmethod", "builtins.property", "functools.cached_property"),
        *("functools.cache", "functools.lru_cache", "functools.wraps", "abc.abstractmethod", "typing.no_type_check"),
        *("typing.override", "typing_extensions.override", "typing.final", "torch.no_grad", "torch.inference_mode"),
        *("lightning.pytorch.utilities.rank_zero_only", "lightning.pytorch.utilities.rank_zero.rank_zero_only"),
    ]
)
"""Decorators that leave what a function returns as it is."""
_HARMLESS_ON_CLASSES: Final = frozenset(
    [
        *("dataclasses.dataclass", "functools.total_ordering", "typing.final", "typing.runtime_checkable"),
        *("attrs.define", "attrs.frozen", "attr.s", "typing_extensions.final"),
    ]
)


class Functions:
    """The part of the evaluator that follows calls.

    Args:
        names: What names mean.
    """

    def __init__(self, names: Names) -> None:
        self.names = names
        self.classes = Classes(names)
        # The same call, object and frame for the same piece of code in the same frame: what is made from itself, and
        # what was judged before, is then noticed. Values are kept with their keys, which are identities.
        self._frames: dict[tuple[int, int, int], tuple[Frame, object]] = {}
        self._calls: dict[tuple[int, int], tuple[Call, object]] = {}
        self._instances: dict[tuple[int, object], tuple[Instance, object]] = {}

    def evaluate(self, node: ast.expr, frame: Frame) -> Values:
        """All that an expression may be."""
        raise NotImplementedError

    def attribute(self, value: Value, name: str, otherwise: Unknown) -> Values:
        """What `value.name` may be."""
        raise NotImplementedError

    def elements(self, values: Values, where: str) -> Values:
        """What may come out of iterating."""
        raise NotImplementedError

    # -- calls

    def call_of(self, node: ast.Call, frame: Frame) -> Call:
        """The arguments of a call."""
        key = (id(node), id(frame))
        if key not in self._calls:
            self._calls[key] = (self._new_call(node, frame), frame)
        return self._calls[key][0]

    def instance(self, kind: ClassSymbol | External, call: Call) -> Instance:
        """The object that a call makes."""
        key = (id(call), kind)
        if key not in self._instances:
            self._instances[key] = (Instance(kind, call), call)
        return self._instances[key][0]

    def _new_call(self, node: ast.Call, frame: Frame) -> Call:
        positional: list[Thunk] = []
        keywords: dict[str, Thunk] = {}
        complete = True
        for one in node.args:
            if isinstance(one, ast.Starred):
                complete = complete and self._spread(one.value, frame, positional)
            else:
                positional.append(self._later(one, frame))
        for keyword in node.keywords:
            if keyword.arg is not None:
                keywords[keyword.arg] = self._later(keyword.value, frame)
            else:
                complete = self._spread_names(keyword.value, frame, keywords) and complete
        return Call(place(frame.module, node), tuple(positional), keywords, complete)

    def _later(self, node: ast.expr, frame: Frame) -> Thunk:
        return lambda: self.evaluate(node, frame)

    def _spread(self, node: ast.expr, frame: Frame, positional: list[Thunk]) -> bool:
        values = self.evaluate(node, frame)
        one = values[0] if len(values) == 1 else None
        if not isinstance(one, Items) or not one.whole or one.mapping:
            return False
        positional += [_given(item) for item in one.values]
        return True

    def _spread_names(self, node: ast.expr, frame: Frame, keywords: dict[str, Thunk]) -> bool:
        complete = bool(values := self.evaluate(node, frame))
        several: dict[str, list[Value]] = {}
        for one in values:
            if isinstance(one, Items) and one.mapping:
                complete = complete and one.whole
                for key, item in zip(one.keys, one.values, strict=True):
                    several.setdefault(str(key), []).extend(item)
            elif isinstance(one, Constant) and one.known and not one.value:
                continue
            else:
                complete = False
        if len(values) > 1:  # each may be absent
            complete = False
        for key, items in several.items():
            keywords.setdefault(key, _given(tuple(items)))
        return complete

    def called(self, callee: Value, call: Call, frame: Frame, node: ast.AST) -> Iterator[Value]:
        """What a call may give."""
        if isinstance(callee, Named):
            yield from self._named(callee, call, frame, node)
        elif isinstance(callee, Method):
            inner = self.method_frame(callee.owner, callee.defined_in, callee.function, call)
            yield from self.returned(callee.function, inner)
        elif isinstance(callee, Partial):
            more = callee.call
            merged = Call(
                call.where,
                (*more.positional, *call.positional),
                {**more.keywords, **call.keywords},
                more.complete and call.complete,
            )
            yield from self.called(callee.callee, merged, frame, node)
        elif isinstance(callee, Instance) and isinstance(callee.kind, ClassSymbol):
            for method in self.attribute(callee, "__call__", Unknown.at(frame, node, f"a call of a {callee.name}")):
                if isinstance(method, Method):
                    yield from self.called(method, call, frame, node)
                else:
                    yield Unknown.at(frame, node, f"a call of a {callee.name}")
        elif isinstance(callee, Instance) and isinstance(callee.kind, External):
            yield self.instance(External(f"{callee.kind.name}()"), call)
        elif isinstance(callee, Unknown):
            yield callee
        elif not (isinstance(callee, Constant) and callee.known and callee.value is None):
            yield Unknown.at(frame, node, "a call that cannot be followed")

    def _named(self, callee: Named, call: Call, frame: Frame, node: ast.AST) -> Iterator[Value]:
        meaning = callee.meaning
        if isinstance(meaning, ClassSymbol):
            yield from self._made(meaning, call, frame, node)
        elif isinstance(meaning, FunctionSymbol):
            yield from self.returned(meaning, self._function_frame(meaning, callee.frame, call))
        elif isinstance(meaning, External):
            yield from self._external(meaning, call, frame, node)
        else:
            yield Unknown.at(frame, node, "a call of a module")

    def _made(self, cls: ClassSymbol, call: Call, frame: Frame, node: ast.AST) -> Iterator[Value]:
        decorators = self.decorators(cls) - _HARMLESS_ON_CLASSES
        if decorators or self.classes.find(cls, "__getattribute__"):
            why = "a decorator may change" if decorators else "a __getattribute__ decides about"
            yield Unknown.at(frame, node, f"{why} {cls.node.name}")
            return
        for keyword in cls.node.keywords:
            if keyword.arg == "metaclass" and not ast.unparse(keyword.value).endswith("ABCMeta"):
                yield Unknown.at(frame, node, f"{cls.node.name} has a metaclass")
                return
        if self.classes.find(cls, "__new__"):
            yield Unknown.at(frame, node, f"{cls.node.name} has a __new__")
            return
        yield self.instance(cls, call)

    def _external(self, meaning: External, call: Call, frame: Frame, node: ast.AST) -> Iterator[Value]:
        name = meaning.name
        given = call.positional
        if name == "functools.partial" and given:
            rest = Call(call.where, given[1:], call.keywords, call.complete)
            for callee in given[0]():
                yield Partial(callee, rest)
        elif name in _PASSED_ON and len(given) > _PASSED_ON[name]:
            yield from given[_PASSED_ON[name]]()
        elif name == "builtins.dict" and not given:
            values = tuple(one() for one in call.keywords.values())
            yield Items(values, tuple(call.keywords), mapping=True, whole=call.complete)
        elif name in (*_SEQUENCES, "builtins.dict") and len(given) == 1:
            found = given[0]()
            items = [one for one in found if isinstance(one, Items)]
            yield from items if len(items) == len(found) else (self.instance(meaning, call),)
        elif name in _NUMBERS:
            yield Constant(known=False)
        elif name in _SPLITS and (given or call.keywords):
            part = self.instance(External("torch.utils.data.Subset"), call)
            yield Items(((part,),), (None,), whole=False)
        elif name == "builtins.getattr" and len(given) >= 2:
            yield from self._getattr(call, frame, node)
        elif name in _DYNAMIC or name.startswith("importlib."):
            yield Unknown.at(frame, node, f"what {meaning.last} gives is decided at run time")
        elif name.startswith("builtins.dict."):
            yield Unknown.at(frame, node, "an item of a mapping")
        else:
            yield self.instance(meaning, call)

    def _getattr(self, call: Call, frame: Frame, node: ast.AST) -> Iterator[Value]:
        key = call.positional[1]()
        name = key[0].value if len(key) == 1 and isinstance(key[0], Constant) and key[0].known else None
        if not isinstance(name, str):
            yield Unknown.at(frame, node, "an attribute whose name is computed")
            return
        for value in call.positional[0]():
            yield from self.attribute(value, name, Unknown.at(frame, node, f"the attribute {name}"))
        for default in call.positional[2:3]:
            yield from default()

    # -- functions

    def bind(self, function: FunctionSymbol, call: Call, owner: Instance | None) -> dict[str, Thunk]:
        """The parameters of a function by name; one that is not given has its default, or cannot be known."""
        node = function.node
        names = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
        bound: dict[str, Thunk] = {}
        outside = Frame(Scope(function.module))
        defaults = node.args.defaults
        for name, default in zip(names[len(names) - len(defaults) :], defaults, strict=True):
            bound[name] = self._later(default, outside)
        for one, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            if value is not None:
                bound[one.arg] = self._later(value, outside)
        if not call.complete:  # what is not given by name may be
            bound = {}
        free = names
        if owner is not None and names:
            me, *free = names
            bound[me] = _given((owner,))
        bound |= dict(zip(free, call.positional, strict=False))
        known = {*names, *(one.arg for one in node.args.kwonlyargs)}
        bound |= {key: value for key, value in call.keywords.items() if key in known}
        if node.args.vararg is not None:
            more = tuple(one() for one in call.positional[len(free) :])
            bound[node.args.vararg.arg] = _given((Items(more, tuple(range(len(more))), whole=call.complete),))
        if node.args.kwarg is not None:
            others = {key: value() for key, value in call.keywords.items() if key not in known}
            items = Items(tuple(others.values()), tuple(others), mapping=True, whole=call.complete)
            bound[node.args.kwarg.arg] = _given((items,))
        return bound

    def _function_frame(self, function: FunctionSymbol, outer: Frame | None, call: Call) -> Frame:
        return self._kept(
            (id(function.node), id(call), id(outer)),
            lambda: Frame(
                Scope(function.module, function.node, outer.scope if outer else None),
                self.bind(function, call, None),
                outer.owner if outer else None,
                outer.after if outer else None,
                outer,
            ),
            (call, outer),
        )

    def method_frame(
        self, owner: Instance, defined_in: ClassSymbol, function: FunctionSymbol, call: Call | None = None
    ) -> Frame:
        """A method's frame; without a call, of `__init__` the arguments are known, of others only `self`."""

        def make() -> Frame:
            node = function.node
            first = next(iter([*node.args.posonlyargs, *node.args.args]), None)
            arguments: dict[str, Thunk] = {first.arg: _given((owner,))} if first is not None else {}
            if call is not None:
                arguments |= self.bind(function, call, owner)
            elif not isinstance(node, ast.Lambda) and node.name == "__init__":
                arguments |= self.parameters(owner, defined_in)
            return Frame(Scope(function.module, node), arguments, owner, defined_in)

        return self._kept((id(owner), id(function.node), id(call)), make, (owner, call))

    def _kept(self, key: tuple[int, int, int], make: object, alive: object) -> Frame:
        """One frame for one call, so that a value that is made from itself is noticed."""
        if key not in self._frames:
            assert callable(make)
            self._frames[key] = (make(), alive)
        return self._frames[key][0]

    def parameters(self, owner: Instance, defined_in: ClassSymbol) -> Mapping[str, Thunk]:
        """The arguments of `__init__`; those of a base class's are followed through `super().__init__(...)`."""
        assert isinstance(owner.kind, ClassSymbol)
        call, after = owner.call, None
        for _ in self.classes.own(owner.kind):
            found = self.classes.find(owner.kind, "__init__", after=after)
            if not found or not isinstance(found[0][1].node, ast.FunctionDef):
                return {}
            cls, node = found[0][0], found[0][1].node
            function = FunctionSymbol(cls.module, node, True)
            bound = self.bind(function, call, owner)
            if cls is defined_in:
                return bound
            above = self.super_init(function, Frame(Scope(cls.module, node), bound, owner, cls))
            if above is None:
                return {}
            call, after = above, cls
        return {}

    def super_init(self, function: FunctionSymbol, frame: Frame) -> Call | None:
        """The arguments of `super().__init__(...)` in a method; None without one."""
        for node in ast.walk(function.node):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "__init__"
                and is_super(node.func.value, frame)
            ):
                return self.call_of(node, frame)
        return None

    def returned(self, function: FunctionSymbol, frame: Frame) -> Values:
        """What a function may return."""
        node = function.node
        if isinstance(node, ast.Lambda):
            return self.evaluate(node.body, frame)
        if isinstance(node, ast.AsyncFunctionDef):
            return (Unknown.at(frame, node, f"{node.name} is asynchronous"),)
        if self.decorators(function) - HARMLESS:
            return (Unknown.at(frame, node, f"a decorator may change what {node.name} returns"),)
        found: list[Value] = []
        returns = False
        for one in own_nodes(node):
            if isinstance(one, ast.Yield | ast.YieldFrom):
                return (Instance(External("builtins.generator"), Call(place(frame.module, node))),)
            if isinstance(one, ast.Return):
                returns = True
                found += self.evaluate(one.value, frame) if one.value is not None else [Constant()]
        return tuple(found) if returns else (Constant(),)

    def decorators(self, thing: FunctionSymbol | ClassSymbol) -> set[str]:
        """The full names of the decorators of a function or a class; `?` for one of the user's own."""
        if isinstance(thing.node, ast.Lambda):
            return set()
        found: set[str] = set()
        for one in thing.node.decorator_list:
            meanings = self.names.expression(Scope(thing.module), one.func if isinstance(one, ast.Call) else one)
            found |= {meaning.name if isinstance(meaning, External) else "?" for meaning in meanings}
        return found


def own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions and classes in it."""
    stack: list[ast.AST] = list(reversed(function.body))
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            stack.extend(reversed(list(ast.iter_child_nodes(node))))


def is_super(node: ast.expr, frame: Frame) -> bool:
    """Whether it is `super()`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "super"
        and not frame.scope.binds("super")
    )


def _given(values: Values) -> Thunk:
    return lambda: values
