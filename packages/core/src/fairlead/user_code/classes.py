"""What a class takes: its own or an inherited `__init__`, or the fields that make one."""

from __future__ import annotations

import ast
from inspect import Parameter, Signature

from fairlead.user_code.source import NotKnownError, SourceError
from fairlead.user_code.symbols import OBJECT, ClassSymbol, FunctionSymbol, KnownSymbol, MissingError, Opaque, Resolver

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


# Decorators that leave the parameters as they are.
_PLAIN_CLASS = frozenset(
    ("typing.final", "typing.runtime_checkable", "functools.total_ordering", "warnings.deprecated")
)
_NO_INIT = frozenset(("typing.Generic", "typing.Protocol", "abc.ABC"))
_DATACLASS = "dataclasses.dataclass"
_NO_FIELDS = ("ClassVar", "InitVar", "KW_ONLY")
_REWRITES = ("__init__", "__new__", "__signature__", "dataclass")


def signature_of(resolver: Resolver, symbol: ClassSymbol | FunctionSymbol) -> Signature:
    """The signature of a class or a function, without `self`; `NotKnownError` where reading cannot tell."""
    if isinstance(symbol, FunctionSymbol):
        return of_function(resolver, symbol)
    return _ClassReader(resolver, symbol).read()


class _ClassReader:
    def __init__(self, resolver: Resolver, cls: ClassSymbol) -> None:
        self.resolver = resolver
        self.cls = cls
        self.mro = resolver.mro(cls)

    def read(self) -> Signature:
        for entry in self.mro:
            if isinstance(entry, ClassSymbol) and (reason := self._changed(entry)):
                raise NotKnownError(reason)
        for index, entry in enumerate(self.mro):
            if isinstance(entry, Opaque):
                raise NotKnownError(entry.reason)
            if isinstance(entry, KnownSymbol):
                if entry.name in _NO_INIT:
                    continue
                return self._inherited(entry, index)
            if "__init__" in entry.own:
                return self._init(entry)
            if self._is_dataclass(entry):
                return self._fields(entry)
            if "__new__" in entry.own:
                raise NotKnownError(f"{entry.node.name} has a __new__")
        return Signature()

    def _changed(self, entry: ClassSymbol) -> str | None:
        """Why the call of a class may not be its `__init__`."""
        name = entry.node.name
        for decorator in entry.node.decorator_list:
            known = qualified(self.resolver, entry, decorator)
            if known not in _PLAIN_CLASS and known != _DATACLASS:
                return f"a decorator of {name} may change what it takes"
        for keyword in entry.node.keywords:
            if keyword.arg != "metaclass":
                return f"{name} is defined with the keyword {keyword.arg}"
            if qualified(self.resolver, entry, keyword.value) != "abc.ABCMeta":
                return f"{name} has a metaclass"
        for hook in entry.own.get("__init_subclass__", ()):
            if _mentions(hook.node, _REWRITES):
                return f"{name} changes its subclasses"
        return None

    def _inherited(self, entry: KnownSymbol, index: int) -> Signature:
        if entry == OBJECT:
            return Signature()
        try:
            real = self.resolver.real(entry)
        except (NotKnownError, MissingError, SourceError) as error:
            raise NotKnownError(f"a base class of {self.cls.node.name} cannot be read: {error}") from None
        if isinstance(real, ClassSymbol) and all(e in _ENDS for e in self.mro[index + 1 :]):
            return signature_of(self.resolver, real)
        raise NotKnownError(f"{self.cls.node.name} takes what {entry.name} takes")

    def _init(self, entry: ClassSymbol) -> Signature:
        bindings = entry.own["__init__"]
        functions = [b.node for b in bindings if isinstance(b.node, ast.FunctionDef)]
        names = [{qualified(self.resolver, entry, d) for d in node.decorator_list} for node in functions]
        real = [node for node, known in zip(functions, names, strict=True) if "typing.overload" not in known]
        if len(functions) != len(bindings) or len(real) != 1:
            raise NotKnownError(f"{entry.node.name} defines __init__ in several ways")
        if not names[functions.index(real[0])] <= PLAIN_FUNCTION:
            raise NotKnownError(f"a decorator of {entry.node.name}.__init__ may change what it takes")
        for other in self.mro:
            if isinstance(other, ClassSymbol) and "__new__" in other.own:
                node = other.own["__new__"][-1].node
                if not (isinstance(node, ast.FunctionDef) and node.args.kwarg and node.args.vararg):
                    raise NotKnownError(f"{other.node.name} has a __new__")
        return from_arguments(real[0].args, drop_first=True)

    def _is_dataclass(self, entry: ClassSymbol) -> bool:
        return any(qualified(self.resolver, entry, d) == _DATACLASS for d in entry.node.decorator_list)

    def _fields(self, entry: ClassSymbol) -> Signature:
        """The generated `__init__` of a dataclass without bases; `NotKnownError` for what may leave a field out."""
        options = [k.arg for d in entry.node.decorator_list if isinstance(d, ast.Call) for k in d.keywords]
        plain = not entry.node.bases and not {"init", None} & set(options)
        fields: list[Parameter] = []
        for name, bindings in entry.own.items():
            node = bindings[-1].node
            if not isinstance(node, ast.AnnAssign):
                continue
            default = node.value
            if isinstance(default, ast.Call) and qualified(self.resolver, entry, default) == "dataclasses.field":
                given = {keyword.arg: keyword.value for keyword in default.keywords}
                plain = plain and not {"init", None} & set(given)
                default = given.get("default", given.get("default_factory"))
            plain = plain and len(bindings) == 1 and not bindings[0].conditional
            plain = plain and not any(word in _text(node.annotation) for word in _NO_FIELDS)
            fields.append(parameter(name, node.annotation, default))
        if not plain:
            raise NotKnownError(f"{entry.node.name} is a dataclass with more than plain fields of its own")
        return Signature(fields)


_ENDS = (*(KnownSymbol(name) for name in _NO_INIT), OBJECT)


def _mentions(node: ast.AST, words: tuple[str, ...]) -> bool:
    for child in ast.walk(node):
        name = getattr(child, "attr", None) or getattr(child, "id", None) or getattr(child, "value", None)
        if name == "setattr" or (isinstance(name, str) and any(word in name for word in words)):
            return True
    return False
