"""What a user's module imports when it is imported itself: a module or a name that is not there ends the start."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fairlead.errors import did_you_mean
from fairlead.user_code.source import ModuleFile, NotKnownError, SourceError
from fairlead.user_code.symbols import MissingError, Resolver, absolute

# A module that changes what can be imported, before it does.
_CHANGES_IMPORTS = (b"sys.path", b"sys.modules", b"sys.meta_path", b"sys.path_hooks", b"importlib", b"site.addsitedir")


@dataclass(frozen=True)
class BrokenImport:
    """An import statement at the top level of a module that certainly fails."""

    file: Path
    line: int
    what: str
    missing: str | None
    """The first part of the module that is not there; None: a name that a module lacks."""
    near: str | None


def broken_import(module: str, resolver: Resolver) -> BrokenImport | None:
    """The first import that fails in the user's module, its packages and the user's modules that these import.

    Imports in a `try`, an `if` or a function are not looked at; nor is anything known where torch is not installed.
    """
    if resolver.sources.locate("torch") is None:
        return None
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop(0)
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            one = ".".join(parts[:end])
            if one in seen:
                continue
            seen.add(one)
            try:
                found = _in_module(one, resolver, waiting)
            except NotKnownError:  # what follows may be made by what cannot be read
                return None
            if found is not None:
                return found
    return None


def _in_module(name: str, resolver: Resolver, waiting: list[str]) -> BrokenImport | None:
    located = resolver.sources.locate(name)
    if located is None or located.file is None or not _users(located, resolver):
        return None
    module = resolver.sources.parse(name)
    assert module is not None
    if any(word in module.text for word in _CHANGES_IMPORTS):
        raise NotKnownError(f"{name} changes what can be imported")
    for node in ast.parse(module.text).body:
        for target, names in _imported(node, module):
            missing = _missing(target, resolver)
            if missing is not None:
                parent, _, last = missing.rpartition(".")
                near = did_you_mean(last, resolver.sources.siblings(parent))
                near = f"{parent}.{near}" if parent and near else near
                what = f"{name} imports {target}, and there is no module {missing!r}"
                return BrokenImport(located.file, node.lineno, what, missing.partition(".")[0], near)
            waiting.append(target)
            for one in names:
                if resolver.sources.locate(f"{target}.{one}") is not None:
                    waiting.append(f"{target}.{one}")
                elif (near := _lacks(target, one, resolver)) is not None:
                    what = f"{name} imports {one} from {target}, which has no such name"
                    return BrokenImport(located.file, node.lineno, what, None, near or None)
    return None


def _imported(node: ast.stmt, module: ModuleFile) -> Iterator[tuple[str, list[str]]]:
    """The modules that a statement imports, each with the names that are taken from it."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, []) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
        yield absolute(module, node), [alias.name for alias in node.names if alias.name != "*"]


def _missing(target: str, resolver: Resolver) -> str | None:
    """The first part of a module's name that is not there."""
    parts = target.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        try:
            found = resolver.sources.locate(name)
        except NotKnownError:
            return None
        if found is None:
            return name
        if not _users(found, resolver):
            return None  # a library may make its submodules at run time
    return None


def _users(found: ModuleFile, resolver: Resolver) -> bool:
    """Whether it is in the user's folders, and not in an environment that lies in one."""
    root = resolver.sources.root
    paths = [found.file] if found.file is not None else list(found.folders)
    return any(
        path.is_relative_to(folder) and not any(path.is_relative_to(one) for one in root.installed)
        for path in paths
        for folder in root.folders
    )


def _lacks(target: str, name: str, resolver: Resolver) -> str | None:
    """Whether a module of the user's certainly lacks a name: then the nearest that it has, or ""."""
    found = resolver.sources.locate(target)
    if found is None or found.file is None or not _users(found, resolver):
        return None
    try:
        resolver.member(target, name)
    except MissingError as error:
        return did_you_mean(name, error.known) or ""
    except (NotKnownError, SourceError):  # a file of the user's that does not parse is met later
        return None
    return None
