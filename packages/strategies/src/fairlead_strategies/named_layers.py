"""A check before a start: the names in a plan are names of the model's layers, by reading its classes' sources."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from fairlead import CheckPlugin, Resolution
from fairlead.findings import CheckResult, Finding
from fairlead.jobs import LoadedJob
from fairlead.patterns import literal_words, near_pattern
from fairlead.user_code.check import is_spec
from fairlead.user_code.lookup import split_spec
from fairlead.user_code.source import ModuleFile, NotKnownError, SourceError, Sources
from fairlead.user_code.symbols import ClassSymbol, FunctionSymbol, MissingError, Resolver, absolute

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_WORD: Final = re.compile(r"[^\W\d]\w*")
_SILENT: Final = frozenset(sys.stdlib_module_names) | {
    *("torch", "lightning", "pytorch_lightning", "lightning_utilities", "torchmetrics", "numpy", "einops"),
}
"""Packages whose calls bring no layers with names of their own, but for those of torch in `_OF_TORCH`."""
_OF_TORCH: Final = frozenset(
    [
        *("self_attn", "multihead_attn", "linear1", "linear2", "dropout", "dropout1", "dropout2", "dropout3"),
        *("norm", "norm1", "norm2", "norm3", "layers", "encoder", "decoder", "in_proj", "out_proj"),
        *("parametrizations", "module"),
    ]
)
"""Names of layers inside of torch.nn's own, and of its wrappers."""
_HAS_TORCHS: Final = frozenset(
    f"Transformer{kind}" for kind in ("", "Encoder", "Decoder", "EncoderLayer", "DecoderLayer")
) | {"MultiheadAttention"}
_COMPUTED: Final = ("getattr", "eval", "exec", "globals", "locals", "vars", "type", "__import__")
_LOADED: Final = re.compile(r"torch\.(load|hub|jit|export|package|fx)\b|importlib\b|pickle\b|pkgutil\b")
_BY_NAME: Final = ("setattr", "add_module", "register_module", "__setattr__", "set_submodule")
_LATER: Final = re.compile(r"forward|on_\w+|\w+_step|\w+_dataloader|configure_optimizers|(load_|)state_dict")
"""Methods that make no layers."""


def check_plan(loaded: LoadedJob, resolution: Resolution, environ: Mapping[str, str], cwd: Path) -> CheckResult:
    """A pattern with a word that is nowhere in the model's sources, and near to a name that is, is an error.

    Says nothing where a layer may have names that reading does not see: of a library, or computed.
    """
    plan = getattr(resolution.strategy, "plan", None)
    if loaded.job is None or not isinstance(plan, Mapping):
        return CheckResult()
    try:
        names = _Names(Sources(loaded.root))
        names.of_spec(loaded.job.model.class_, loaded.job.model.args)
    except (NotKnownError, MissingError, SourceError, RecursionError, ValueError):
        return CheckResult()
    return CheckResult(tuple(_unknown(plan, names)))


def _unknown(plan: Mapping[str, str], names: _Names) -> Iterator[Finding]:
    layers = names.assigned | (_OF_TORCH if _HAS_TORCHS & names.words else set())
    for pattern in plan:
        written = set(literal_words(pattern))
        strange = [word for word in literal_words(pattern) if word not in names.words | _OF_TORCH]
        near = near_pattern(pattern, layers | written.difference(strange)) if strange else None
        if near is not None:
            yield Finding(
                "error",
                "plan-matches-nothing",
                f"the pattern {pattern!r} matches no layer of the model",
                where=f"trainer.strategy.plan, {pattern!r}",
                why=f"{strange[0]!r} is nowhere in {', '.join(sorted(file.name for file in names.files))}",
                fix=f"did you mean {near!r}?",
            )


class _Names:
    """What the classes of a model call their layers.

    Raises:
        NotKnownError: Some of the names cannot be known by reading.
    """

    def __init__(self, sources: Sources) -> None:
        self.words: set[str] = set()
        """All names and texts in the files that were read."""
        self.assigned: set[str] = set()
        """The names that may be those of layers."""
        self.files: set[Path] = set()
        self._resolver = Resolver(sources)
        self._folders = sources.root.folders
        self._seen: set[int] = set()

    def of_spec(self, spec: str, args: Mapping[str, object]) -> None:
        """Reads a class, or a function that makes one, and the classes among its arguments."""
        module, name = split_spec(spec)
        if name is None:
            module, _, name = module.rpartition(".")
        symbol = self._resolver.member(module, name.partition(".")[0])
        for part in name.split(".")[1:]:
            symbol = self._resolver.attribute(symbol, part)
        if not isinstance(symbol, ClassSymbol | FunctionSymbol):
            raise NotKnownError(f"{spec} is no class")
        self._of(symbol)
        for value in args.values():
            self._of_value(value)

    def _of_value(self, value: object) -> None:
        if isinstance(value, Mapping):
            if is_spec(value):
                self.of_spec(value["class"], value.get("args") or {})
            else:
                for one in value.values():
                    self._of_value(one)
        elif isinstance(value, list | tuple):
            for one in value:
                self._of_value(one)

    def _of(self, symbol: ClassSymbol | FunctionSymbol) -> None:
        module, node = symbol.module, symbol.node
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        if module.file is None or not self._is_users(module):
            raise NotKnownError(f"{module.name} is not the user's")
        if module.file not in self.files:
            self.files.add(module.file)
            self.words |= set(_WORD.findall(module.text.decode(errors="replace")))
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                self._called(module, base.value if isinstance(base, ast.Subscript) else base, frozenset())
            for part in node.body:
                self._read(module, part)
        else:
            self._read(module, node)

    def _read(self, module: ModuleFile, node: ast.AST) -> None:
        makes = not (isinstance(node, _FUNCTION) and _LATER.fullmatch(node.name))
        own = _own_names(node)
        inside = {part.name for part in ast.walk(node) if isinstance(part, (*_FUNCTION, ast.ClassDef))}
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                self.assigned.add(part.attr)
            if not makes:
                continue
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                self.assigned |= {word for word in part.value.split(".") if word.isidentifier()}
            elif isinstance(part, ast.Call):
                if getattr(part.func, "id", None) not in inside:
                    self._call(module, part, own)
            elif isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Store):
                if not isinstance(part.slice, ast.Constant | ast.Slice | ast.Tuple):
                    raise NotKnownError("a key is computed")
            elif isinstance(part, ast.Name) and part.id in module.names and part.id not in own:
                self._mentioned(module, part)

    def _call(self, module: ModuleFile, call: ast.Call, own: frozenset[str]) -> None:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name in _BY_NAME and not any(isinstance(one, ast.Constant) for one in call.args[:2]):
            raise NotKnownError("a name is computed")
        if name in ("ModuleDict", "OrderedDict", "dict"):
            self.assigned |= {one.arg for one in call.keywords if one.arg is not None}
            if not all(_has_plain_keys(one) for one in call.args) or any(one.arg is None for one in call.keywords):
                raise NotKnownError("the keys are computed")
        self._called(module, call.func, own)

    def _called(self, module: ModuleFile, function: ast.expr, own: frozenset[str]) -> None:
        """Reads what is called, or inherited from; raises where that may bring layers whose names are not seen."""
        root = function
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name):
            if isinstance(function, ast.Attribute):  # a method of a value: `super().__init__`, `torch.ones(3).mean`
                return
            raise NotKnownError("what is called is computed")
        if root.id in own and root.id not in ("self", "cls"):
            if isinstance(function, ast.Name):
                raise NotKnownError(f"{root.id} is a variable")
            return
        if root.id in ("self", "cls", "super"):
            if function is root and root.id != "super":
                raise NotKnownError("the class itself is called")
            return
        if root.id not in module.names and hasattr(builtins, root.id):
            if root.id in _COMPUTED:
                raise NotKnownError(f"{root.id} may give anything")
            return
        full = _imported(module, root.id)
        if full is not None and full.partition(".")[0] in _SILENT:
            if _LOADED.match(full + ast.unparse(function)[len(root.id) :]):
                raise NotKnownError("a module is loaded")
            return
        symbol = self._resolver.expression(module, function)
        if not isinstance(symbol, ClassSymbol | FunctionSymbol):
            raise NotKnownError(f"{ast.unparse(function)} cannot be read")
        self._of(symbol)

    def _mentioned(self, module: ModuleFile, name: ast.Name) -> None:
        """Reads a class of the user's that is handed on to be called elsewhere."""
        full = _imported(module, name.id)
        if full is not None and full.partition(".")[0] in _SILENT:
            return
        try:
            symbol = self._resolver.expression(module, name)
        except (NotKnownError, MissingError):
            return
        if isinstance(symbol, ClassSymbol) and self._is_users(symbol.module):
            self._of(symbol)

    def _is_users(self, module: ModuleFile) -> bool:
        return module.file is not None and any(module.file.is_relative_to(folder) for folder in self._folders)


def _has_plain_keys(node: ast.expr) -> bool:
    """Whether a mapping, or a list of pairs, is written out with texts as its keys; so is a call that is looked at."""
    if isinstance(node, ast.Dict):
        return all(isinstance(key, ast.Constant) for key in node.keys)
    if isinstance(node, ast.List | ast.Tuple):
        pairs = [one for one in node.elts if isinstance(one, ast.Tuple | ast.List) and one.elts]
        return len(pairs) == len(node.elts) and all(isinstance(one.elts[0], ast.Constant) for one in pairs)
    return isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in (
        "OrderedDict",
        "dict",
    )


def _own_names(node: ast.AST) -> frozenset[str]:
    """Arguments and local variables of a function."""
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.arg):
            found.add(part.arg)
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            found.add(part.id)
    return frozenset(found)


def _imported(module: ModuleFile, name: str) -> str | None:
    """The full name of what an import binds to a name."""
    bindings = module.names.get(name, [])
    if len(bindings) != 1 or bindings[0].alias is None:
        return None
    node, alias = bindings[0].node, bindings[0].alias
    if isinstance(node, ast.ImportFrom):
        return f"{absolute(module, node)}.{alias.name}"
    return alias.name if alias.asname else alias.name.partition(".")[0]


named_layers = CheckPlugin(
    "fairlead_strategies.named_layers:check_plan",
    codes={"plan-matches-nothing": "A pattern of a plan names layers that the model does not have."},
)
