"""What is put into a list or a mapping after it was made: `loaders.append(...)`, `options["sampler"] = ...`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Final

from fairlead.exactness.values import Constant, Items, Value, Values

__all__ = ["Change", "changed", "changes"]

_ONE: Final = {"append": 0, "add": 0, "appendleft": 0, "insert": 1, "setdefault": 1}
"""Methods that put in one value, by its position."""
_SEVERAL: Final = ("extend", "update", "extendleft")


class Change:
    """One statement that puts something in.

    Args:
        value: What is put in; None: nothing that can be told.
        key: Under which key; None: an unknown one, or at the end of a list.
        several: Whether the items of the value are put in.
    """

    def __init__(self, value: ast.expr | None, key: object = None, *, several: bool = False) -> None:
        self.value, self.key, self.several = value, key, several


def changes(body: ast.AST, is_it: Callable[[ast.expr], bool]) -> Iterator[Change]:
    """The statements in a function that change the collection that `is_it` recognises."""
    for node in ast.walk(body):
        if isinstance(node, ast.Assign | ast.AugAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Subscript) and is_it(target.value):
                    yield Change(node.value, target.slice.value if isinstance(target.slice, ast.Constant) else None)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_it(node.func.value):
            yield from _called(node, node.func.attr)


def _called(node: ast.Call, method: str) -> Iterator[Change]:
    if method in _ONE and len(node.args) > _ONE[method]:
        first = node.args[0]
        keyed = method == "setdefault" and isinstance(first, ast.Constant)
        yield Change(node.args[_ONE[method]], first.value if keyed and isinstance(first, ast.Constant) else None)
    elif method in _SEVERAL:
        for argument in node.args:
            yield Change(argument, several=True)
        for keyword in node.keywords:
            yield Change(keyword.value, keyword.arg, several=keyword.arg is None)


def changed(
    items: Items, made: list[Change], evaluate: Callable[[ast.expr], Values], elements: Callable[[Values], Values]
) -> Items:
    """The collection with all that may have been put in."""
    values, keys, whole = list(items.values), list(items.keys), items.whole
    for change in made:
        given = evaluate(change.value) if change.value is not None else ()
        inner = [one for one in given if isinstance(one, Items) and one.mapping]
        if change.several and items.mapping and inner and len(inner) == len(given):
            for one in inner:
                values += [_perhaps(value) for value in one.values]
                keys += one.keys
                whole = whole and one.whole
        elif items.mapping and change.key is not None:
            values.append(_perhaps(given))
            keys.append(change.key)
        else:
            values.append(elements(given) if change.several else given)
            keys.append(None)
            whole = False
    if items.mapping and None not in keys:
        return Items(tuple(_merged(values, keys)), tuple(dict.fromkeys(keys)), True, whole)
    return Items(tuple(values), tuple(keys), items.mapping, whole)


def _perhaps(values: Values) -> Values:
    """A value that is put in where a branch is taken."""
    return (*values, Constant())


def _merged(values: list[Values], keys: list[object]) -> Iterator[tuple[Value, ...]]:
    for key in dict.fromkeys(keys):
        yield tuple(value for k, one in zip(keys, values, strict=True) if k == key for value in one)
