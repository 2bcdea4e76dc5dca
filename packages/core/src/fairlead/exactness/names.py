"""What a name in the user's code means: a class or function of theirs, or something of a package, by its full name.

Nothing of a package is read: of torch's `DataLoader` its name says enough, and torch need not be installed.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fairlead.user_code import split_spec
from fairlead.user_code.roots import CodeRoot
from fairlead.user_code.source import Binding, ModuleFile, NotKnownError, SourceError, Sources, bind
from fairlead.user_code.symbols import ClassSymbol, FunctionSymbol, Resolver

__all__ = ["External", "Global", "Lost", "Meaning", "ModuleName", "Names", "Scope", "place"]

_MAX_HOPS: Final = 30
# What is read of one job: a project's own modules, not a whole distribution of packages.
_MAX_MODULES: Final = 60
_MAX_BYTES: Final = 1_500_000
_GLOBAL: Final = re.compile(rb"^[ \t]+global[ \t]+([^\n#;]+)", re.MULTILINE)
# `thing.attribute = ...`, `thing[0].part.attribute: int = ...`
_ATTRIBUTE_SET: Final = re.compile(
    rb"(?<![\w.\])])(\w+(?:\.\w+|\(\)|\[[^\]\n]*\])*)\.(\w+)[ \t]*(?::[^=\n]+)?[-+*/|&]?=(?!=)"
)


@dataclass(frozen=True)
class External:
    """Something of a package, by its full name: `torch.utils.data.DataLoader`."""

    name: str

    @property
    def last(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class ModuleName:
    """A module of the user's."""

    name: str


@dataclass(frozen=True)
class Global:
    """A value that a module of the user's computes when it is imported."""

    module: ModuleFile = field(compare=False, repr=False)
    node: ast.expr = field(compare=True)


@dataclass(frozen=True)
class Lost:
    """A name whose meaning cannot be told."""

    why: str


Meaning = External | ModuleName | ClassSymbol | FunctionSymbol | Global | Lost


def place(module: ModuleFile, node: ast.AST) -> str:
    """`data.py:12`."""
    file = module.file.name if module.file is not None else module.name
    return f"{file}:{getattr(node, 'lineno', 1)}"


class Scope:
    """The names that a function binds, and those of the functions around it.

    Args:
        module: The module.
        node: The function; None: the top level of the module.
        outer: The function around it.
    """

    def __init__(
        self,
        module: ModuleFile,
        node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None = None,
        outer: Scope | None = None,
    ) -> None:
        self.module, self.node, self.outer = module, node, outer
        self.names: dict[str, list[Binding]] = {}
        self.parameters: set[str] = set()
        if node is None:
            return
        arguments = node.args
        several = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        self.parameters = {one.arg for one in (*several, arguments.vararg, arguments.kwarg) if one is not None}
        if not isinstance(node, ast.Lambda):
            body = ModuleFile(module.name, module.file)
            bind(body, node)  # type: ignore[arg-type]  # it reads `body` alone
            self.names = body.names
        for inner in ast.walk(node):
            if isinstance(inner, ast.comprehension | ast.NamedExpr):
                for target in ast.walk(inner.target):
                    if isinstance(target, ast.Name):
                        self.names.setdefault(target.id, []).append(Binding(inner, True))

    def binds(self, name: str) -> bool:
        """Whether a name is a local one, here or in a function around."""
        return name in self.names or name in self.parameters or (self.outer is not None and self.outer.binds(name))


class Names:
    """Resolves names in the modules of the user's folders, and in the packages that the job names itself.

    Args:
        root: Where code is found.
        specs: The `module:object` names of the job.
        known: Packages that are not read even if the job names them.

    Attributes:
        sources: The files that were read.
        unread: Why a module of the user's could not be read, by module.
    """

    def __init__(self, root: CodeRoot, specs: tuple[str, ...], known: frozenset[str]) -> None:
        self.sources = Sources(root)
        self.unread: dict[str, str] = {}
        self._resolver = Resolver(self.sources)
        self._own: dict[str, bool] = {}
        self._read: dict[str, ModuleFile] = {}
        self._outside: dict[str, dict[str, int]] = {}
        self._globals: dict[str, set[str]] = {}
        named = {spec.replace(":", ".").partition(".")[0] for spec in specs}
        self._named = named - known - sys.stdlib_module_names

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that were read."""
        return tuple(module.file for module in self._read.values() if module.file is not None)

    def set_from_outside(self, attribute: str) -> str | None:
        """Where code of the user's sets an attribute of an object that is not its own `self`; None where none does."""
        for module in self._read.values():
            if module.name not in self._outside:
                self._outside[module.name] = {
                    found[2].decode(): module.text.count(b"\n", 0, found.start()) + 1
                    for found in _ATTRIBUTE_SET.finditer(module.text)
                    if found[1] not in (b"self", b"cls")
                }
            line = self._outside[module.name].get(attribute)
            if line is not None and module.file is not None:
                return f"{module.file.name}:{line}"
        return None

    def is_own(self, module: str) -> bool:
        """Whether a module is the user's: it lies in one of their folders, or the job names its package."""
        top = module.partition(".")[0]
        if top not in self._own:
            self._own[top] = top in self._named or self._in_folders(top)
        return self._own[top]

    def _in_folders(self, top: str) -> bool:
        try:
            found = self.sources.locate(top)
        except NotKnownError:
            return False
        if found is None:
            return False
        places = found.folders or ((found.file,) if found.file is not None else ())
        return any(one.parent in self.sources.root.folders for one in places)

    def module(self, name: str) -> ModuleFile | None:
        """A module of the user's, parsed; None where it cannot be read, which `unread` then tells."""
        if name in self._read:
            return self._read[name]
        if name in self.unread:
            return None
        if len(self._read) >= _MAX_MODULES or sum(len(one.text) for one in self._read.values()) > _MAX_BYTES:
            self.unread[name] = f"{len(self._read)} modules were read before it, and no more are"
            return None
        try:
            found = self.sources.parse(name)
        except SourceError as error:
            line = f":{error.line}" if error.line else ""
            self.unread[name] = f"{error.file}{line} does not parse"
            return None
        except NotKnownError as error:
            self.unread[name] = str(error)
            return None
        if found is not None:
            self._read[name] = found
        return found

    def class_symbol(self, module: ModuleFile, node: ast.ClassDef) -> ClassSymbol:
        """The class of a `class` statement."""
        return self._resolver.class_symbol(module, node)

    def spec(self, spec: str) -> list[Meaning]:
        """What a `module:object` of the job names."""
        try:
            module, name = split_spec(spec)
        except ValueError as error:
            return [Lost(str(error))]
        if name is not None:
            parts = name.split(".")
        else:
            whole = module.split(".")
            end = len(whole) - 1
            while end > 1 and not self._exists(".".join(whole[:end])):
                end -= 1
            module, parts = ".".join(whole[:end]), whole[end:]
        found: list[Meaning] = [ModuleName(module) if self.is_own(module) else External(module)]
        for part in parts:
            found = [meaning for one in found for meaning in self.attribute(one, part)]
        return found

    def _exists(self, module: str) -> bool:
        try:
            return self.sources.locate(module) is not None
        except NotKnownError:
            return True

    def attribute(self, meaning: Meaning, name: str, hops: int = 0) -> list[Meaning]:
        """The meaning of `meaning.name`."""
        if isinstance(meaning, External):
            return [External(f"{meaning.name}.{name}")]
        if isinstance(meaning, ModuleName):
            return self._member(meaning.name, name, hops)
        if isinstance(meaning, ClassSymbol):
            bindings = meaning.own.get(name, [])
            return [one for b in bindings for one in self.bound(meaning.module, b, name, hops + 1)] or [
                Lost(f"{meaning.node.name}.{name}")
            ]
        return [meaning if isinstance(meaning, Lost) else Lost(f"the attribute {name} of a value")]

    def _member(self, module: str, name: str, hops: int) -> list[Meaning]:
        if not self.is_own(module):
            return [External(f"{module}.{name}")]
        if hops > _MAX_HOPS:  # `from . import part` in the package itself, or a circle
            if self._exists_below(module, name):
                return [ModuleName(f"{module}.{name}")]
            self.unread[f"{module}.{name}"] = "it is imported in a circle, or over too many modules"
            return [Lost(f"{module}.{name} is imported in a circle, or over too many modules")]
        found = self.module(module)
        if found is None:
            return [Lost(self.unread.get(module, f"there is no module {module}"))]
        if name not in found.names and self._exists_below(module, name):
            return [ModuleName(f"{module}.{name}")]
        return self.top_level(found, name, hops + 1)

    def _exists_below(self, module: str, name: str) -> bool:
        try:
            return self.sources.locate(f"{module}.{name}") is not None
        except NotKnownError:
            return False

    def top_level(self, module: ModuleFile, name: str, hops: int = 0) -> list[Meaning]:
        """The meaning of a name at the top level of a module; several where the module does not decide."""
        bindings = module.names.get(name, [])
        if name in self._set_by_functions(module):
            return [Lost(f"a function of {module.name} sets {name}")]
        if bindings:
            last = max((i for i, b in enumerate(bindings) if not b.conditional), default=0)
            return [one for b in bindings[last:] for one in self.bound(module, b, name, hops)]
        if hasattr(builtins, name):
            return [External(f"builtins.{name}")]
        found: list[Meaning] = []
        for star in module.stars:
            found += [one for one in self._member(absolute(module, star), name, hops + 1) if not isinstance(one, Lost)]
        return found or [Lost(f"{name} is not defined in {module.name}")]

    def _set_by_functions(self, module: ModuleFile) -> set[str]:
        """The names of a module that a function sets with `global`."""
        if module.name not in self._globals:
            found = _GLOBAL.findall(module.text)
            self._globals[module.name] = {word.decode() for line in found for word in re.findall(rb"\w+", line)}
        return self._globals[module.name]

    def bound(self, module: ModuleFile, binding: Binding, name: str, hops: int = 0) -> list[Meaning]:
        """What one statement gives a name, where it is a definition, an import or a plain assignment."""
        node, alias = binding.node, binding.alias
        if isinstance(node, ast.ClassDef):
            return [self.class_symbol(module, node)]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return [FunctionSymbol(module, node)]
        if isinstance(node, ast.Import) and alias is not None:
            full = alias.name if alias.asname else alias.name.partition(".")[0]
            return [ModuleName(full) if self.is_own(full) else External(full)]
        if isinstance(node, ast.ImportFrom) and alias is not None:
            return self._member(absolute(module, node), alias.name, hops + 1)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                if isinstance(node.value, ast.Name | ast.Attribute) and hops < _MAX_HOPS:  # an alias
                    return self.expression(Scope(module), node.value, hops + 1)
                return [Global(module, node.value)]
        return [Lost(f"{name} is computed in {place(module, node)}")]

    def expression(self, scope: Scope, node: ast.expr, hops: int = 0) -> list[Meaning]:
        """The meaning of `name` or `name.part.part` in a scope; a local value is lost here."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return [Lost("it is computed")]
        found = self.name(scope, node.id, hops)
        for part in reversed(parts):
            found = [meaning for one in found for meaning in self.attribute(one, part, hops)]
        return found

    def name(self, scope: Scope, name: str, hops: int = 0) -> list[Meaning]:
        """The meaning of a name in a scope: imports and definitions in functions count, local values are lost."""
        inner: Scope | None = scope
        while inner is not None and name not in inner.names and name not in inner.parameters:
            inner = inner.outer
        if inner is None:
            return self.top_level(scope.module, name, hops)
        if name in inner.parameters:
            return [Lost(f"{name} is an argument")]
        found: list[Meaning] = []
        for binding in inner.names[name]:
            if isinstance(binding.node, ast.Import | ast.ImportFrom | ast.ClassDef):
                found += self.bound(scope.module, binding, name, hops)
            else:
                found.append(Lost(f"{name} is a local value"))
        return found


def absolute(module: ModuleFile, node: ast.ImportFrom) -> str:
    """The full name of the module that a `from ... import` names."""
    if not node.level:
        return node.module or ""
    parts = module.package.split(".")
    kept = parts[: max(0, len(parts) - node.level + 1)]
    return ".".join([*kept, *([node.module] if node.module else [])])
