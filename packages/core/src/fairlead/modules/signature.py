"""What a function takes, from its syntax tree.

Where a decorator, a metaclass or a base class that cannot be read may change it, the signature is
*open*: it then accepts everything, and says why.  A false error would stop a job that is right.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from fairlead.modules.source import NotKnownError, SourceError
from fairlead.modules.symbols import (
    ClassSymbol,
    FunctionSymbol,
    KnownSymbol,
    MissingError,
    Resolver,
)

__all__ = ["Parameter", "Signature", "from_arguments", "of_function", "opened", "qualified", "text_of"]


@dataclass(frozen=True)
class Parameter:
    """One parameter; `default` is the text of its default, None without one."""

    name: str
    required: bool
    annotation: str | None = None
    default: str | None = None
    positional_only: bool = False


@dataclass(frozen=True)
class Signature:
    """The parameters of a callable, without `self`.

    Attributes:
        parameters: In their order.
        var_keyword: Whether other names are accepted (`**kwargs`).
        open_reason: Why the signature cannot be known; then everything is accepted.
        checked_types: Whether an annotation says what a value must be (pydantic converts values).
    """

    parameters: tuple[Parameter, ...] = ()
    var_keyword: bool = False
    open_reason: str | None = None
    checked_types: bool = True


# Decorators that leave the parameters as they are.
PLAIN_FUNCTION = frozenset(
    [
        *("typing.final", "typing.override", "typing.overload", "typing.no_type_check", "abc.abstractmethod"),
        *("warnings.deprecated", "functools.cache", "functools.lru_cache", "contextlib.contextmanager"),
        *("builtins.staticmethod", "builtins.classmethod"),
    ]
)


def opened(reason: str) -> Signature:
    """A signature that accepts everything."""
    return Signature(open_reason=reason)


def qualified(resolver: Resolver, symbol: ClassSymbol | FunctionSymbol, node: ast.expr) -> str:
    """The full name of a decorator, a metaclass or an annotation, as far as it is a known one; else ""."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    try:
        found = resolver.expression(symbol.module, node)
    except (NotKnownError, MissingError, SourceError):
        return ""
    return found.name if isinstance(found, KnownSymbol) else ""


def of_function(resolver: Resolver, symbol: FunctionSymbol) -> Signature:
    """The signature of a function, a class method or a lambda."""
    node = symbol.node
    decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
    names = {qualified(resolver, symbol, decorator) for decorator in decorators}
    if not names <= PLAIN_FUNCTION:
        return opened("a decorator may change what it takes")
    return from_arguments(node.args, drop_first=symbol.method and "builtins.classmethod" in names)


def from_arguments(arguments: ast.arguments, *, drop_first: bool) -> Signature:
    """The signature of a parameter list, without its first parameter if that is `self` or `cls`."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    only = len(arguments.posonlyargs)
    parameters = [
        _parameter(arg, default, positional_only=index < only)
        for index, (arg, default) in enumerate(zip(positional, defaults, strict=True))
    ]
    if drop_first:
        parameters = parameters[1:]
    parameters += [_parameter(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return Signature(tuple(parameters), var_keyword=arguments.kwarg is not None)


def _parameter(arg: ast.arg, default: ast.expr | None, *, positional_only: bool = False) -> Parameter:
    return Parameter(arg.arg, default is None, text_of(arg.annotation), text_of(default), positional_only)


def text_of(node: ast.expr | None) -> str | None:
    """An expression as text."""
    if node is None:
        return None
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return repr(node.value)
    try:
        return ast.unparse(node)
    except RecursionError:
        return "..."
