"""What a name means: follows imports, re-exports, aliases and base classes from file to file."""

from __future__ import annotations

import ast
import builtins
import contextlib
import re
from dataclasses import dataclass, field

from fairlead.user_code.source import Binding, ModuleFile, NotKnownError, SourceError, Sources, bind

# Read by their names, not by their source: what they do to a class is part of the language; pydantic makes its
# `__init__` of fields, aliases and validators, which reading cannot follow.
KNOWN_MODULES = frozenset(
    [
        *("abc", "builtins", "collections", "contextlib", "dataclasses", "enum", "functools", "typing", "warnings"),
        "pydantic",
    ]
)
# Large files that nearly every model leads to.  They have no metaclass and change no signature of a
# class with its own __init__, so they are read only when their own __init__ is what counts.
# Also: they may not be installed where `check` runs.
TRUSTED = frozenset(
    [
        *("torch.nn.Module", "torch.nn.modules.Module", "torch.nn.modules.module.Module"),
        *("torch.optim.Optimizer", "torch.optim.optimizer.Optimizer", "torch.utils.data.Dataset"),
        *("torch.utils.data.IterableDataset", "torch.utils.data.dataset.Dataset"),
        *(
            f"{package}.{name}"
            for package in ("lightning", "lightning.pytorch", "pytorch_lightning", "lightning.pytorch.core")
            for name in ("LightningModule", "LightningDataModule", "Callback")
        ),
        *("lightning.pytorch.core.module.LightningModule", "lightning.pytorch.core.datamodule.LightningDataModule"),
        *("lightning.pytorch.callbacks.Callback", "pytorch_lightning.callbacks.Callback"),
    ]
)
# What a job names of these is not looked for where torch is not: on a login node they are absent by design.
ENGINES = frozenset(
    [
        *("torch", "lightning", "pytorch_lightning", "torchmetrics", "torchvision", "torchaudio", "torchdata"),
        *("deepspeed", "transformers", "datasets", "accelerate", "bitsandbytes", "torch_geometric"),
    ]
)
# Packages whose own large file need not be read to know that these are modules.
TRUSTED_MODULES = frozenset(("torch.nn", "torch.optim", "torch.utils"))


_DYNAMIC_NAMES = re.compile(rb"\bglobals\(\)|\bvars\(\)|\blocals\(\)|\bexec\(|sys\.modules\[__name__\]|__getattr__")
_MAX_HOPS = 40
_LITERALS = (ast.Constant, ast.List, ast.Dict, ast.Set, ast.Tuple, ast.JoinedStr)


class MissingError(Exception):
    """A module or class certainly has no such name; `known` are the names it has."""

    def __init__(self, owner: str, name: str, known: list[str]) -> None:
        super().__init__(f"{owner} has no {name!r}")
        self.owner, self.name, self.known = owner, name, known


@dataclass(frozen=True)
class ModuleSymbol:
    """A module."""

    name: str


@dataclass(frozen=True)
class KnownSymbol:
    """Something known by its full name, not by its source."""

    name: str


@dataclass(frozen=True)
class FunctionSymbol:
    """A function, a method or a lambda."""

    module: ModuleFile = field(compare=False, repr=False)
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    method: bool = False


@dataclass(frozen=True)
class ValueSymbol:
    """A literal: certainly not callable."""

    module: ModuleFile = field(compare=False, repr=False)
    node: ast.expr


@dataclass(frozen=True)
class ClassSymbol:
    """A class, with the names that its body binds."""

    module: ModuleFile = field(compare=False, repr=False)
    node: ast.ClassDef
    body: ModuleFile = field(compare=False, repr=False)

    @property
    def own(self) -> dict[str, list[Binding]]:
        """What the class body itself binds."""
        return self.body.names


@dataclass(frozen=True)
class Opaque:
    """A base class that could not be read, in an MRO."""

    reason: str


Symbol = ModuleSymbol | KnownSymbol | FunctionSymbol | ValueSymbol | ClassSymbol
Ancestor = ClassSymbol | KnownSymbol | Opaque
Seen = tuple[tuple[str, str], ...]
OBJECT = KnownSymbol("builtins.object")


class Resolver:
    """Resolves names in the modules of one `Sources`."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._classes: dict[int, ClassSymbol] = {}
        self._shadows: dict[Ancestor, type] = {}

    def member(self, module_name: str, name: str, seen: Seen = (), *, trust: bool = True) -> Symbol:
        """The meaning of a module's attribute.

        `MissingError`: it certainly is not there; `NotKnownError`: reading cannot tell; `SourceError`: no valid source.
        """
        module_name = {"typing_extensions": "typing"}.get(module_name, module_name)
        if module_name in KNOWN_MODULES or (trust and f"{module_name}.{name}" in TRUSTED):
            return KnownSymbol(f"{module_name}.{name}")
        if f"{module_name}.{name}" in TRUSTED_MODULES:
            return ModuleSymbol(f"{module_name}.{name}")
        if (module_name, name) in seen and self.sources.locate(f"{module_name}.{name}") is not None:
            return ModuleSymbol(f"{module_name}.{name}")  # `from . import part` in the package itself
        if (module_name, name) in seen or len(seen) > _MAX_HOPS:
            raise NotKnownError(f"{module_name}.{name} is imported in a circle or over too many modules")
        seen = (*seen, (module_name, name))
        module = self.sources.parse(module_name)
        if module is None:
            raise NotKnownError(f"the module {module_name} is not installed here")
        if name not in module.names:
            return self._not_bound(module, name, seen)
        last = module.names[name][-1].node
        for star in module.stars:  # the standard library ends pure Python modules with `from _fast import *`
            if star.lineno > getattr(last, "lineno", 0):
                with contextlib.suppress(MissingError):
                    return self.member(absolute(module, star), name, seen)
        return self._choose(module, name, module.names[name], seen)

    def _not_bound(self, module: ModuleFile, name: str, seen: Seen) -> Symbol:
        """A name from `import *`, a submodule, or one that is made at run time."""
        doubt: NotKnownError | None = None
        for star in reversed(module.stars):
            source = absolute(module, star)
            if (source, name) in seen:
                continue
            try:
                return self.member(source, name, seen)
            except NotKnownError as error:
                doubt = error
            except MissingError:
                continue
        if module.folders and self.sources.locate(f"{module.name}.{name}") is not None:
            return ModuleSymbol(f"{module.name}.{name}")
        if _DYNAMIC_NAMES.search(module.text) or re.search(rb"\bglobal\b[^\n]*\b%s\b" % name.encode(), module.text):
            raise NotKnownError(f"{module.name} makes names at run time")
        if doubt is not None:
            raise doubt
        raise MissingError(module.name, name, self.names_of(module.name))

    def names_of(self, module_name: str, depth: int = 0) -> list[str]:
        """The names of a module, those of its star imports too, for a did-you-mean."""
        try:
            module = self.sources.parse(module_name)
        except (NotKnownError, SourceError):
            return []
        if module is None or depth > 2:
            return []
        starred = [name for star in module.stars for name in self.names_of(absolute(module, star), depth + 1)]
        return [*module.names, *starred]

    def _choose(self, module: ModuleFile, name: str, bindings: list[Binding], seen: Seen) -> Symbol:
        """The last binding counts; where several may, they must agree on the only callable."""
        bindings = [b for b in bindings if not _is_overload(b.node)] or bindings
        last = max((i for i, b in enumerate(bindings) if not b.conditional), default=0)
        symbols: list[Symbol] = []
        doubts: list[NotKnownError | MissingError] = []
        for binding in bindings[last:]:
            try:
                symbol = self._bound(module, binding, seen)
            except (NotKnownError, MissingError) as error:
                doubts.append(error)
            else:
                if symbol not in symbols:
                    symbols.append(symbol)
        if len(symbols) + len(doubts) == 1:
            if doubts:
                raise doubts[0]
            return symbols[0]
        callables = [symbol for symbol in symbols if not isinstance(symbol, ValueSymbol)]
        if len(callables) == 1 and not doubts:
            return callables[0]
        raise NotKnownError(f"{module.name} defines {name} in several ways")

    def _bound(self, module: ModuleFile, binding: Binding, seen: Seen) -> Symbol:
        node, alias = binding.node, binding.alias
        if isinstance(node, ast.ClassDef):
            return self.class_symbol(module, node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return FunctionSymbol(module, node)
        if isinstance(node, ast.Import) and alias is not None:
            return ModuleSymbol(alias.name if alias.asname else alias.name.split(".")[0])
        if isinstance(node, ast.ImportFrom) and alias is not None:
            source = absolute(module, node)
            try:
                return self.member(source, alias.name, seen)
            except MissingError as error:  # the import itself fails, unless something else put the name there
                raise NotKnownError(f"{module.name} imports {alias.name} from {source}: {error}") from None
            except SourceError as error:
                raise NotKnownError(f"{error.file} does not parse: {error.message}") from None
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if all(isinstance(target, ast.Name) for target in targets):
                return self.expression(module, node.value, seen)
        raise NotKnownError(f"{module.name} computes it when it is imported")

    def class_symbol(self, module: ModuleFile, node: ast.ClassDef) -> ClassSymbol:
        """The class of a `class` statement."""
        if id(node) not in self._classes:
            body = ModuleFile(f"{module.name}.{node.name}", module.file)
            bind(body, node)
            self._classes[id(node)] = ClassSymbol(module, node, body)
        return self._classes[id(node)]

    def expression(self, module: ModuleFile, node: ast.expr, seen: Seen = ()) -> Symbol:
        """The meaning of an expression at a module's top level."""
        if isinstance(node, ast.Name):
            if node.id not in module.names and not module.stars and hasattr(builtins, node.id):
                return KnownSymbol(f"builtins.{node.id}")
            return self.member(module.name, node.id, seen)
        if isinstance(node, ast.Attribute):
            parts: list[str] = []
            value: ast.expr = node
            while isinstance(value, ast.Attribute):  # a loop: a chain may be of any length
                parts.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name):
                symbol = self.expression(module, value, seen)
                for part in reversed(parts):
                    symbol = self.attribute(symbol, part, seen)
                return symbol
        if isinstance(node, ast.Lambda):
            return FunctionSymbol(module, node)
        if isinstance(node, _LITERALS):
            return ValueSymbol(module, node)
        raise NotKnownError(f"{module.name} computes it when it is imported (line {node.lineno})")

    def attribute(self, symbol: Symbol, name: str, seen: Seen = ()) -> Symbol:
        """The meaning of `symbol.name`; raises as `member` does."""
        if isinstance(symbol, ModuleSymbol):
            return self.member(symbol.name, name, seen)
        if isinstance(symbol, KnownSymbol):
            return KnownSymbol(f"{symbol.name}.{name}")
        if not isinstance(symbol, ClassSymbol):
            raise NotKnownError(f"an attribute ({name}) of something that is no module and no class")
        known: list[str] = []
        for ancestor in self.mro(symbol):
            if isinstance(ancestor, ClassSymbol):
                if name in ancestor.own:
                    found = self._choose(ancestor.body, name, ancestor.own[name], seen)
                    return (
                        FunctionSymbol(ancestor.module, found.node, True)
                        if isinstance(found, FunctionSymbol)
                        else found
                    )
                if ancestor.node.decorator_list or ancestor.node.keywords:
                    raise NotKnownError(f"{ancestor.node.name} is changed when it is defined")
                known.extend(ancestor.own)
            elif ancestor != OBJECT:
                raise NotKnownError(f"a base class of {symbol.node.name} may have it")
        if hasattr(object, name):
            raise NotKnownError(f"{name} is an attribute of every class")
        raise MissingError(f"{symbol.module.name}.{symbol.node.name}", name, known)

    def real(self, symbol: Symbol) -> Symbol:
        """The source of a trusted class, for where its own `__init__` counts; any other symbol as it is."""
        for _ in range(_MAX_HOPS):  # it may be imported from another trusted name
            if not isinstance(symbol, KnownSymbol) or symbol.name not in TRUSTED:
                break
            module, _, name = symbol.name.rpartition(".")
            symbol = self.member(module, name, trust=False)
        return symbol

    def mro(self, cls: ClassSymbol) -> list[Ancestor]:
        """The method resolution order, with `Opaque` for what cannot be read."""
        try:
            return [vars(kind).get("symbol", OBJECT) for kind in self._shadow(cls, ()).__mro__]
        except TypeError:
            return [cls, Opaque(f"the bases of {cls.node.name} have no consistent order")]

    def _shadow(self, ancestor: Ancestor, inside: Seen) -> type:
        """An empty class with such bases as the ancestor has, for Python to put them in order."""
        if ancestor == OBJECT:
            return object
        if ancestor not in self._shadows:
            bases: list[type] = []
            if isinstance(ancestor, ClassSymbol):
                here = (ancestor.module.name, ancestor.node.name)
                if here in inside or len(inside) > _MAX_HOPS:
                    return type("", (), {"symbol": Opaque(f"the bases of {ancestor.node.name} form a circle")})
                bases = [self._shadow(self._base(ancestor, base), (*inside, here)) for base in ancestor.node.bases]
            self._shadows[ancestor] = type("", tuple(bases), {"symbol": ancestor})
        return self._shadows[ancestor]

    def _base(self, cls: ClassSymbol, base: ast.expr) -> Ancestor:
        while isinstance(base, ast.Subscript):  # Generic[T], Dataset[int]
            base = base.value
        try:
            symbol = self.expression(cls.module, base)
        except (NotKnownError, MissingError, SourceError) as error:
            return Opaque(f"a base class of {cls.node.name} cannot be read: {error}")
        if isinstance(symbol, KnownSymbol | ClassSymbol):
            return symbol
        return Opaque(f"a base class of {cls.node.name} is computed")


def absolute(module: ModuleFile, node: ast.ImportFrom) -> str:
    """The full name of the module that a `from ... import` names."""
    if not node.level:
        return node.module or ""
    parts = module.package.split(".")
    if not module.package or node.level > len(parts):
        raise NotKnownError(f"{module.name} has a relative import beyond its package")
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def _is_overload(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    names = (d.attr if isinstance(d, ast.Attribute) else getattr(d, "id", "") for d in node.decorator_list)
    return "overload" in names
