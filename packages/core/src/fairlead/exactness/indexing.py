"""`tensor[index]` with a tensor as index: the one operation whose gradient a CPU does not compute in a fixed order.

Seen with torch 2.13 on two cores: of 45 operations and their gradients, repeated ten times each, only the gradient of
`x[index]` with repeated indices differed.  Several threads add to the same elements, unless deterministic algorithms
are asked for.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from typing import Final

from fairlead.exactness.kinds import MODULES
from fairlead.exactness.names import Scope, place
from fairlead.exactness.reach import Reach, Unit
from fairlead.findings import Inexact

__all__ = ["indexed_tensors"]

_BECAUSE: Final = "on a CPU several threads add up its gradient, in an order of their own, if an index comes twice"
_DO: Final = "trainer.deterministic: true"
_WHOLE_NUMBERS: Final = frozenset(("len", "int", "range", "round", "ord", "str", "repr", "slice", "type", "min", "max"))
_TEXTS: Final = frozenset(("int", "str", "slice", "bool", "bytes"))
_SIZES: Final = (
    "size",
    "numel",
    "dim",
    "item",
    "index",
    "count",
    "format",
    "join",
    "lower",
    "upper",
    "strip",
    "tolist",
)
_INDEX_ARGUMENTS: Final = ("batch_idx", "dataloader_idx", "optimizer_idx", "epoch", "step", "name", "key", "stage")
# What they compute with is torch's own, or does not concern gradients.
_WITHOUT: Final = frozenset(
    [
        *(
            "torch",
            "torchmetrics",
            "lightning",
            "pytorch_lightning",
            "lightning_fabric",
            "lightning_utilities",
            "numpy",
        ),
        *(
            "fairlead",
            "fairlead_distributed",
            "fairlead_lightning",
            "einops",
            "jaxtyping",
            "typing_extensions",
            "builtins",
        ),
        *("tqdm", "rich", "yaml", "omegaconf", "pydantic", "packaging", "matplotlib", "PIL", "pandas", "hparams"),
    ]
)


def indexed_tensors(reach: Reach) -> Iterator[Inexact]:
    """Where a model may take elements of a tensor by a tensor of indices, in its own code or in a package's."""
    for unit in reach.units:
        if unit.side == "model" and (unit.owner is None or reach.classes.is_a(unit.owner, MODULES)):
            for node in _indexed(unit):
                yield Inexact(
                    f"{ast.unparse(node)[:60]} in {place(unit.module, node)}", why=_BECAUSE, fix=_DO, certain=False
                )
                return  # one is enough to say it
    seen: set[str] = set()
    for use in reach.uses:
        top = use.name.partition(".")[0]
        if use.unit.side == "model" and top not in _WITHOUT and top not in sys.stdlib_module_names and top not in seen:
            seen.add(top)
            where = place(use.unit.module, use.node)
            yield Inexact(
                f"the layers of {top} in {where}",
                why=f"they are not read; if they take x[index], {_BECAUSE}",
                fix=_DO,
                certain=False,
            )


def _indexed(unit: Unit) -> Iterator[ast.Subscript]:
    names = _numbers(unit.node, unit.scope)
    skipped = {id(inner) for node in ast.walk(unit.node) for inner in _annotations(node)}
    for node in ast.walk(unit.node):
        if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load) or id(node) in skipped:
            continue
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if any(not _is_number(part, names) for part in parts):
            yield node


def _annotations(node: ast.AST) -> Iterator[ast.AST]:
    notes = (getattr(node, name, None) for name in ("annotation", "returns"))
    for note in notes:
        if isinstance(note, ast.AST):
            yield from ast.walk(note)


def _numbers(function: ast.AST, scope: Scope) -> set[str]:
    """Names that certainly are whole numbers, texts or slices."""
    found = set(_INDEX_ARGUMENTS)
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = function.args
        for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            note = one.annotation
            if isinstance(note, ast.Name) and note.id in _TEXTS:
                found.add(one.arg)
    for _ in range(3):  # a name that is made of others
        for name, bindings in scope.names.items():
            if bindings and all(_gives_number(name, binding.node, found) for binding in bindings):
                found.add(name)
    return found


def _gives_number(name: str, node: ast.AST, known: set[str]) -> bool:
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        if isinstance(target, ast.Name):
            return _is_number(node.value, known)
        shape = isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
        sizes = isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute)
        return shape or (sizes and isinstance(node.value, ast.Call) and ast.unparse(node.value.func).endswith(".size"))
    if isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
        return node.value is not None and _is_number(node.value, known)
    if isinstance(node, ast.For | ast.comprehension):
        return _counts(name, node.target, node.iter)
    return False


def _counts(name: str, target: ast.expr, iterated: ast.expr) -> bool:
    called = iterated.func.id if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) else None
    if called == "range":
        return True
    if called == "enumerate" and isinstance(target, ast.Tuple):
        return isinstance(target.elts[0], ast.Name) and target.elts[0].id == name
    texts = isinstance(iterated, ast.Tuple | ast.List) and all(isinstance(one, ast.Constant) for one in iterated.elts)
    keys = isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Attribute) and iterated.func.attr == "keys"
    if texts or keys:
        return True
    items = (
        isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Attribute) and iterated.func.attr == "items"
    )
    return (
        items and isinstance(target, ast.Tuple) and isinstance(target.elts[0], ast.Name) and target.elts[0].id == name
    )


def _is_number(node: ast.expr, known: set[str]) -> bool:
    """Whether an index is no tensor: a number, a text, a slice, `...`, None, or a comparison, whose places differ."""
    if isinstance(node, ast.Constant | ast.Slice | ast.JoinedStr | ast.Compare):
        return True
    if isinstance(node, ast.Name):
        return node.id in known or node.id in _TEXTS
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not | ast.Invert) or _is_number(node.operand, known)
    if isinstance(node, ast.BinOp):
        return _is_number(node.left, known) and _is_number(node.right, known)
    if isinstance(node, ast.IfExp):
        return _is_number(node.body, known) and _is_number(node.orelse, known)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name):
            return node.func.id in _WHOLE_NUMBERS
        return isinstance(node.func, ast.Attribute) and node.func.attr in _SIZES
    if isinstance(node, ast.Subscript):  # x.shape[0]
        return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    return False
