"""What a function takes, from its syntax tree.

What a decorator, a metaclass or an unreadable base class may change is not known, and every argument is accepted:
a false error would stop a job that is right.
"""

from __future__ import annotations

import ast
from inspect import Parameter, Signature

from fairlead.user_code.source import NotKnownError, SourceError
from fairlead.user_code.symbols import (
    ClassSymbol,
    FunctionSymbol,
    KnownSymbol,
    MissingError,
    Resolver,
)

# Decorators that leave the parameters as they are.
PLAIN_FUNCTION = frozenset(
    [
        *("typing.final", "typing.override", "typing.overload", "typing.no_type_check", "abc.abstractmethod"),
        *("warnings.deprecated", "functools.cache", "functools.lru_cache", "contextlib.contextmanager"),
        *("builtins.staticmethod", "builtins.classmethod"),
    ]
)


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
    """The signature of a function, a class method or a lambda; `NotKnownError` where a decorator may change it."""
    node = symbol.node
    decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
    names = {qualified(resolver, symbol, decorator) for decorator in decorators}
    if not names <= PLAIN_FUNCTION:
        raise NotKnownError("a decorator may change what it takes")
    return from_arguments(node.args, drop_first=symbol.method and "builtins.classmethod" in names)


def from_arguments(arguments: ast.arguments, *, drop_first: bool) -> Signature:
    """The signature of a parameter list, without its first parameter if that is `self` or `cls`."""
    positional = [
        *((arg, Parameter.POSITIONAL_ONLY) for arg in arguments.posonlyargs),
        *((arg, Parameter.POSITIONAL_OR_KEYWORD) for arg in arguments.args),
    ]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    parameters = [
        parameter(arg.arg, arg.annotation, default, kind)
        for (arg, kind), default in zip(positional, defaults, strict=True)
    ][drop_first:]
    parameters += [
        parameter(arg.arg, arg.annotation, default)
        for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        parameters.append(parameter(arguments.kwarg.arg, None, None, Parameter.VAR_KEYWORD))
    return Signature(parameters)


def parameter(
    name: str, annotation: ast.expr | None, default: ast.expr | None, kind: object = Parameter.KEYWORD_ONLY
) -> Parameter:
    """One parameter; its annotation and its default are their text."""
    return Parameter(
        name,
        kind,  # type: ignore[arg-type]  # a member of a private enum
        default=Parameter.empty if default is None else _text(default),
        annotation=Parameter.empty if annotation is None else _text(annotation),
    )


def _text(node: ast.expr) -> str:
    try:
        return ast.unparse(node)
    except RecursionError:
        return "..."
