"""`module:object` to what it takes, or to the problem with it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from inspect import Signature
from pathlib import Path

from fairlead.errors import did_you_mean
from fairlead.user_code.classes import signature_of
from fairlead.user_code.roots import CodeRoot
from fairlead.user_code.source import NotKnownError, SourceError, Sources
from fairlead.user_code.symbols import (
    ENGINES,
    OBJECT,
    TRUSTED,
    ClassSymbol,
    FunctionSymbol,
    MissingError,
    ModuleSymbol,
    Opaque,
    Resolver,
    Symbol,
    ValueSymbol,
)

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
MAX_SPEC = 500


@dataclass(frozen=True)
class Problem:
    """What is wrong with a `{class:, args:}` node at a path below it, by one of `fairlead.findings.CODES`."""

    code: str
    path: tuple[str | int, ...]
    what: str
    why: str | None = None
    fix: str | None = None


@dataclass(frozen=True)
class CallableInfo:
    """What a `module:object` names; without a signature (its annotations are text), `unknown` says why."""

    spec: str
    name: str
    signature: Signature | None
    unknown: str | None = None
    file: Path | None = None
    line: int | None = None


class _SpecError(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.what)
        self.problem = problem


def split_spec(spec: str) -> tuple[str, str | None]:
    """`module:object` as its two parts; without a colon the second is None. A `ValueError` says how to write it."""
    module, colon, name = spec.partition(":")
    if len(spec) <= MAX_SPEC and _DOTTED.fullmatch(module) and ((colon and _DOTTED.fullmatch(name)) or "." in spec):
        if not colon:
            return module, None
        if _DOTTED.fullmatch(name) and not module.endswith(".py"):
            return module, name
    if module.endswith(".py"):
        dotted = module.removesuffix(".py").strip("./").replace("/", ".")
        raise ValueError(f"name the module, not its file: {dotted}:{name or 'NAME'}")
    raise ValueError("write module:object, for example examples.gpt.model:GPT")


def find_callable(spec: str, root: CodeRoot, *, sources: Sources | None = None) -> CallableInfo | Problem:
    """Looks `module:object` or `module.object` up by reading source; nothing is imported, no parent package either."""
    sources = Sources(root) if sources is None else sources
    try:
        return _find(spec, sources)
    except _SpecError as error:
        return error.problem
    except NotKnownError as error:
        return _problem(
            "class-unchecked", f"what {spec[:MAX_SPEC]} takes cannot be known without importing it", str(error)
        )
    except SourceError as error:
        return _does_not_parse(error)
    except RecursionError:
        return _problem("class-unchecked", f"{spec} is too deeply nested to read")


def _does_not_parse(error: SourceError) -> Problem:
    line = f":{error.line}" if error.line else ""
    return _problem("class-syntax", f"{error.file}{line} does not parse", error.message, "correct the file")


def _problem(code: str, what: str, why: str | None = None, fix: str | None = None) -> Problem:
    return Problem(code, ("class",), what, why, fix)


def _find(spec: str, sources: Sources) -> CallableInfo:
    resolver, module, name = _module_of(spec, sources)
    symbol = _symbol_of(resolver, module, name)
    if isinstance(symbol, ModuleSymbol | ValueSymbol):
        kind = "a module" if isinstance(symbol, ModuleSymbol) else "a value"
        raise _SpecError(_problem("class-not-callable", f"{spec} is {kind}, not a class or a function"))
    if not isinstance(symbol, ClassSymbol | FunctionSymbol):
        raise NotKnownError(f"{name} is not written in a source file that can be read")
    signature: Signature | None = None
    unknown: str | None = None
    try:
        signature = signature_of(resolver, symbol)
    except NotKnownError as error:
        unknown = str(error)
    return CallableInfo(spec, name, signature, unknown, symbol.module.file, symbol.node.lineno)


def _module_of(spec: str, sources: Sources) -> tuple[Resolver, str, str]:
    try:
        module, name = split_spec(spec)
    except ValueError as error:
        raise _SpecError(_problem("module-not-found", f"{spec[:80]!r} names no class", None, str(error))) from None
    if name is None:
        module, name = _guess(module, sources)
    _require(module, sources)
    return Resolver(sources), module, name


def _symbol_of(resolver: Resolver, module: str, name: str) -> Symbol:
    symbol: Symbol = ModuleSymbol(module)
    owner = ""
    for part in name.split("."):
        try:
            symbol = resolver.real(resolver.attribute(symbol, part))
        except MissingError as error:
            near = did_you_mean(part, error.known)
            fix = f"did you mean {module}:{owner}{near}?" if near else _choices(error.known)
            what = f"{error.owner} has no {part!r}"
            raise _SpecError(_problem("class-not-found", what, _where(module, resolver.sources), fix)) from None
        owner += f"{part}."
    return symbol


def lacks_method(spec: str, method: str, sources: Sources) -> list[str] | None:
    """The names that a class has, where neither it nor a base of its certainly has a method; else None.

    The methods of Lightning's own classes do not count: they are there to be overridden.
    """
    try:
        resolver, module, name = _module_of(spec, sources)
        symbol = _symbol_of(resolver, module, name)
        if not isinstance(symbol, ClassSymbol):
            return None
        known: list[str] = []
        for entry in resolver.mro(symbol):
            if isinstance(entry, ClassSymbol):
                if entry.node.decorator_list or entry.node.keywords or _may_set(entry, method):
                    return None
                known += entry.own
            elif isinstance(entry, Opaque) or (entry != OBJECT and entry.name not in TRUSTED):
                return None
    except (_SpecError, NotKnownError, MissingError, SourceError, RecursionError):
        return None
    return known


def _may_set(cls: ClassSymbol, method: str) -> bool:
    """Whether a class has an attribute, or its module may set it."""
    if method in cls.own or "__getattr__" in cls.own:
        return True
    return re.search(rb"\bsetattr\b|\.%s\b" % method.encode(), cls.module.text) is not None


def _guess(dotted: str, sources: Sources) -> tuple[str, str]:
    """`pkg.mod.Class`: the longest part that is a module."""
    parts = dotted.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if sources.locate(".".join(parts[:end])) is not None:
            if end == len(parts) - 1 and sources.locate(dotted) is not None:
                raise _SpecError(_problem("class-not-callable", f"{dotted} is a module", None, f"write {dotted}:NAME"))
            return ".".join(parts[:end]), ".".join(parts[end:])
    return ".".join(parts[:-1]), parts[-1]


def _require(module: str, sources: Sources) -> None:
    parts = module.split(".")
    if parts[0] in ENGINES and sources.locate(parts[0]) is None and sources.locate("torch") is None:
        raise NotKnownError(f"{parts[0]} is not installed here, nor is torch: it is looked for where the job runs")
    for end in range(1, len(parts) + 1):
        name, parent = ".".join(parts[:end]), ".".join(parts[: end - 1])
        if sources.locate(name) is None:
            near = did_you_mean(parts[end - 1], sources.siblings(parent))
            near = None if not parent and near in sys.stdlib_module_names else near
            proposal = ".".join([*parts[: end - 1], near or "", *parts[end:]])
            where = f"looked in:\n{sources.root.describe()}"
            if parent:
                where = f"{parent} has no such module ({_folders(parent, sources)})\n{where}"
            fix = f"did you mean {proposal}?" if near else "set run.code to the folder that holds it, or install it"
            raise _SpecError(_problem("module-not-found", f"there is no module {name!r}", where, fix))


def _folders(package: str, sources: Sources) -> str:
    found = sources.locate(package)
    if found is None or not (found.folders or found.file):
        return package
    return ", ".join(str(folder) for folder in found.folders) or f"{found.file} is not a package"


def _where(module: str, sources: Sources) -> str | None:
    found = sources.locate(module)
    return None if found is None or found.file is None else f"read {found.file}"


def _choices(names: Iterable[str]) -> str | None:
    public = sorted({name for name in names if not name.startswith("_")})
    return f"it has: {', '.join(public[:12])}{', ...' if len(public) > 12 else ''}" if public else None
