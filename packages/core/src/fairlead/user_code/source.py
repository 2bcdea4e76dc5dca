"""Finds the file of a module as Python's import would, and reads it; nothing is imported or run."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

from fairlead.errors import names_in
from fairlead.user_code.roots import CodeRoot

MAX_FILES = 300
MAX_BYTES = 6_000_000
# A package that changes where its submodules come from, or makes modules out of nothing.
_DYNAMIC_PACKAGE = re.compile(r"__path__|\bsys\.modules\[[^\]]*\]\s*=[^=]|\bsys\.modules\.(update|setdefault)\b")


class NotKnownError(Exception):
    """Reading cannot tell; the text says why."""


class SourceError(Exception):
    """A source file does not parse."""

    def __init__(self, file: Path, line: int | None, message: str) -> None:
        super().__init__(message)
        self.file, self.line, self.message = file, line, message


@dataclass(frozen=True)
class Binding:
    """One statement that gives a name a meaning: a `def`, a `class`, an import or an assignment."""

    node: ast.AST
    conditional: bool  # in an if, try, with or loop: it may not be the one that counts
    alias: ast.alias | None = None


@dataclass
class ModuleFile:
    """A module: its source and what its top level binds.  `file` is None for a namespace package."""

    name: str
    file: Path | None
    folders: tuple[Path, ...] = ()  # a package: where its submodules are
    text: bytes = b""
    names: dict[str, list[Binding]] = field(default_factory=dict)
    stars: list[ast.ImportFrom] = field(default_factory=list)

    @property
    def package(self) -> str:
        """What a relative import of this module starts from."""
        return self.name if self.folders else self.name.rpartition(".")[0]


class Sources:
    """Module files by name, located and parsed once per check; past 300 files or 6 MB the answer is `NotKnownError`."""

    def __init__(self, root: CodeRoot) -> None:
        self.root = root
        self._path = (*root.folders, *root.installed)
        self._located: dict[str, ModuleFile | None] = {}
        self._parsed: dict[str, ModuleFile] = {}
        self._bytes = 0
        PathFinder.invalidate_caches()  # a file may be younger than what an earlier look-up remembers of its folder

    def locate(self, name: str) -> ModuleFile | None:
        """The module's location, None without one; `NotKnownError`: binary, in an archive, or made at run time."""
        if name not in self._located:
            parent, _, last = name.rpartition(".")
            if parent:
                self._located[name] = self._in_package(parent, last)
            else:
                self._located[name] = self._find(name, name, self._path) or self._elsewhere(name)
        return self._located[name]

    def _in_package(self, parent: str, last: str) -> ModuleFile | None:
        package = self.locate(parent)
        if package is None:
            return None
        found = self._find(f"{parent}.{last}", last, package.folders)
        if found is None and package.file is not None:
            text = _read(package.file).decode(errors="replace")
            if _DYNAMIC_PACKAGE.search(text) and (last in text or "__path__" in text):
                raise NotKnownError(f"{parent} decides at run time which modules it has")
        return found

    def _find(self, name: str, last: str, folders: Sequence[Path]) -> ModuleFile | None:
        spec = PathFinder.find_spec(last, [str(folder) for folder in folders])
        if spec is None:
            return None
        inside = tuple(Path(path) for path in spec.submodule_search_locations or ())
        if spec.origin is None:  # a namespace package
            return ModuleFile(name, None, inside)
        if isinstance(spec.loader, SourceFileLoader):
            return ModuleFile(name, Path(spec.origin), inside)
        raise NotKnownError(f"{name} is compiled or in an archive ({spec.origin}); there is no source to read")

    def _elsewhere(self, name: str) -> ModuleFile | None:
        """Built-in modules, and editable installs that bring their own finder; only a top-level name, so no import."""
        if name in sys.builtin_module_names or name == "__main__":
            raise NotKnownError(f"{name} has no source file")
        for finder in sys.meta_path:
            if "editable" not in getattr(finder, "__module__", type(finder).__module__) and "Editable" not in repr(
                finder
            ):
                continue
            spec = finder.find_spec(name, None)
            if spec is None:
                continue
            folders = tuple(Path(path) for path in spec.submodule_search_locations or ())
            if spec.origin and spec.origin.endswith(".py"):
                return ModuleFile(name, Path(spec.origin), folders)
            raise NotKnownError(f"{name} is installed in a way that only an import resolves")
        if name in sys.modules:
            raise NotKnownError(f"{name} was made at run time")
        return None

    def siblings(self, parent: str) -> list[str]:
        """The modules of a package, or all top-level ones (""), for a did-you-mean."""
        package = self.locate(parent) if parent else None
        folders = self._path if not parent else () if package is None else package.folders
        entries = [Path(name) for folder in folders for name in names_in(folder)]
        names = {entry.name.partition(".")[0] for entry in entries if entry.suffix in (".py", ".so", "")}
        return sorted(name for name in names - {"__init__"} if name.isidentifier())

    def parse(self, name: str) -> ModuleFile | None:
        """The module with its names, None without one; `SourceError` where it does not parse."""
        if name not in self._parsed:
            module = self.locate(name)
            if module is None:
                return None
            if module.file is not None:
                self._fill(module, module.file)
            self._parsed[name] = module
        return self._parsed[name]

    def _fill(self, module: ModuleFile, file: Path) -> None:
        module.text = _read(file)
        self._bytes += len(module.text)
        if len(self._parsed) >= MAX_FILES or self._bytes > MAX_BYTES:
            raise NotKnownError("more source would have to be read than a check allows")
        bind(module, _parse(file, module.text))


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise NotKnownError(f"{file} cannot be read: {error.strerror}") from None


def _parse(file: Path, text: bytes) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" in somebody's docstring is not our business
            return ast.parse(text, str(file))
    except SyntaxError as error:  # also raised for bytes that do not decode
        raise SourceError(file, error.lineno, error.msg) from None
    except ValueError as error:
        raise SourceError(file, None, str(error)) from None
    except (RecursionError, MemoryError):
        raise NotKnownError(f"{file} is too deeply nested to read") from None


def bind(module: ModuleFile, tree: ast.Module | ast.ClassDef) -> None:
    """Notes what each statement at the top level binds, looking into if, try, with, loops and match."""
    # A stack, not recursion: an `elif` chain nests as deep as it is long.
    stack: list[tuple[ast.AST, bool]] = [(node, False) for node in reversed(tree.body)]
    while stack:
        node, conditional = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            _add(module, node.name, Binding(node, conditional))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*":
                    assert isinstance(node, ast.ImportFrom)
                    module.stars.append(node)
                else:
                    bound = alias.asname or (
                        alias.name if isinstance(node, ast.ImportFrom) else alias.name.split(".")[0]
                    )
                    _add(module, bound, Binding(node, conditional, alias))
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Delete | ast.For | ast.AsyncFor):
            targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
            for target in targets:
                for name in _target_names(target):
                    _add(module, name, Binding(node, conditional))
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                if item.optional_vars is not None:
                    for name in _target_names(item.optional_vars):
                        _add(module, name, Binding(node, conditional))
        # A with block runs as its text says; every other block may be skipped.
        inner = conditional or not isinstance(node, ast.With | ast.AsyncWith)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            stack.extend((child, inner) for child in reversed(list(_blocks(node))))


def _add(module: ModuleFile, name: str, binding: Binding) -> None:
    module.names.setdefault(name, []).append(binding)


def _blocks(node: ast.AST) -> Iterator[ast.AST]:
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        children = getattr(node, part, None)
        if isinstance(children, list):  # a lambda's or a conditional expression's body is no list
            yield from children


def _target_names(target: ast.AST) -> Iterator[str]:
    for node in ast.walk(target):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.id
