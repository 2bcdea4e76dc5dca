"""Random generators of the user's own: whose state is saved by nobody, unless they live no longer than a sample."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from fairlead.exactness.kinds import DATALOADERS, ITERABLE_DATASETS, MAP_DATASETS, MODULES, STATEFUL_LOADERS
from fairlead.exactness.names import External, Scope, place
from fairlead.exactness.reach import Reach, Unit
from fairlead.findings import Inexact
from fairlead.user_code.symbols import ClassSymbol, FunctionSymbol

__all__ = ["GENERATORS", "Generators", "draws_random_numbers"]

GENERATORS: Final = frozenset(
    [
        *("random.Random", "random.SystemRandom", "torch.Generator", "torch._C.Generator", "numpy.random.default_rng"),
        *("numpy.random.Generator", "numpy.random.RandomState", "numpy.random.mtrand.RandomState"),
        *(f"numpy.random.{name}" for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64", "SeedSequence")),
    ]
)
_ALWAYS_SEEDED: Final = frozenset(("torch.Generator", "torch._C.Generator"))
_SEEDING: Final = frozenset(("numpy.random.seed", "random.seed", "torch.seed", "torch.random.seed"))
_DRAWS: Final = (
    *("random.", "numpy.random.", "torch.rand", "torch.normal", "torch.bernoulli", "torch.multinomial"),
    *("torch.poisson", "torch.nn.functional.dropout", "torchvision.transforms", "torchaudio.transforms"),
)
_TAKERS: Final = ("torch.", "numpy.", "random.", "builtins.", "scipy.", "sklearn.")
_STATES: Final = (("state_dict", "load_state_dict"), ("on_save_checkpoint", "on_load_checkpoint"))
_STARTS: Final = ("__init__", "setup", "prepare_data")
_DATAMODULES: Final = frozenset(
    f"{name}.LightningDataModule"
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning", "lightning.pytorch.core.datamodule")
)
_REMEMBERED: Final = frozenset(("functools.cached_property", "functools.cache", "functools.lru_cache"))
_PLAIN: Final = frozenset(("builtins.staticmethod", "builtins.classmethod", "typing.override", "torch.no_grad"))
_DEPTH: Final = 5
_DRAW: Final = "draw from the global generators, or from sample_rng(seed, epoch, index) of fairlead_distributed"


def draws_random_numbers(reach: Reach) -> bool:
    """Whether the code of the data draws from the global generators, or may."""
    return any(use.unit.side == "data" and use.name.startswith(_DRAWS) for use in reach.uses)


class Generators:
    """Finds the generators that outlive what they are made for.

    Args:
        reach: The code that a fit runs.
        ranks: Ranks in all.
    """

    def __init__(self, reach: Reach, *, ranks: int) -> None:
        self._reach, self._names, self._classes, self._ranks = reach, reach.names, reach.classes, ranks
        self._factories: set[int] = set()

    def reasons(self) -> tuple[list[Inexact], list[Inexact]]:
        """What is to be said of them: first of those that a start may find in the data, then of the others."""
        for _ in range(3):  # a function that returns what another one returns
            found = {id(unit.node) for unit in self._reach.units if self._returns_one(unit)}
            if found <= self._factories:
                break
            self._factories |= found
        in_objects: list[Inexact] = []
        others: list[Inexact] = []
        for unit in self._reach.units:
            held = unit.side == "data" and unit.owner is not None
            for call, scope in self._made(unit):
                fate = self._fate_of(unit, call, scope)
                seen = in_objects if held and (fate == "lost" or fate.startswith(f"kept {unit.me}.")) else others
                seen += self._judged(unit, call, scope, fate)
            others += self._seeded_anew(unit)
            (in_objects if held else others).extend(self._handed_on(unit))
        return in_objects, others

    # -- where they are made

    def _made(self, unit: Unit) -> Iterator[tuple[ast.Call, Scope]]:
        parents = unit.parents
        for node, scope in unit.references:
            call = parents.get(node)
            if isinstance(call, ast.Call) and call.func is node and self._makes(unit, node, scope):
                yield call, scope

    def _makes(self, unit: Unit, node: ast.expr, scope: Scope) -> bool:
        if (method := self._own_method(unit, node)) is not None:
            return id(method.node) in self._factories
        for meaning in self._names.expression(scope, node):
            if isinstance(meaning, External) and meaning.name in GENERATORS:
                return True
            if isinstance(meaning, FunctionSymbol) and id(meaning.node) in self._factories:
                return True
        return False

    def _own_method(self, unit: Unit, node: ast.expr) -> FunctionSymbol | None:
        """The method that `self.name` means."""
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == unit.me):
            return None
        if unit.owner is None:
            return None
        for cls, binding in self._classes.find(unit.owner, node.attr):
            if isinstance(binding.node, ast.FunctionDef):
                return FunctionSymbol(cls.module, binding.node, True)
        return None

    def _returns_one(self, unit: Unit) -> bool:
        parents = unit.parents
        for call, _ in self._made(unit):
            value, used = self._climb(unit, call)
            parent = parents.get(value) if not used else None
            if isinstance(parent, ast.Return):
                return True
            if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Name):
                name = parent.targets[0].id
                returns = (n for n in ast.walk(unit.node) if isinstance(n, ast.Return))
                if any(isinstance(n.value, ast.Name) and n.value.id == name for n in returns):
                    return True
        return False

    def _climb(self, unit: Unit, call: ast.AST) -> tuple[ast.AST, bool]:
        """The outermost expression whose value is the generator, and whether it was used on the way."""
        parents, node = unit.parents, call
        while True:
            parent = parents.get(node)
            above = parents.get(parent) if parent is not None else None
            if isinstance(parent, ast.Attribute) and isinstance(above, ast.Call) and above.func is parent:
                if parent.attr not in ("manual_seed", "set_state", "__enter__"):
                    return node, True  # something is drawn from it at once
                node = above
            elif isinstance(parent, ast.IfExp | ast.BoolOp | ast.NamedExpr | ast.Starred):
                node = parent
            else:
                return node, False

    # -- what becomes of them

    def _fate_of(self, unit: Unit, call: ast.Call, scope: Scope) -> str:
        value, used = self._climb(unit, call)
        return "used" if used else self._fate(unit, value, scope, _DEPTH)

    def _judged(self, unit: Unit, call: ast.Call, scope: Scope, fate: str) -> Iterator[Inexact]:
        where = place(unit.module, call)
        if fate in ("used", "returned", "loader") and self._unseeded(call, scope):
            yield Inexact(
                f"the random generator without a seed in {where}",
                why="the operating system seeds it, at every start anew",
                fix=f"give it a seed, or {_DRAW}",
            )
        elif fate.startswith("kept"):
            yield from self._kept(unit, fate.partition(" ")[2], where)
        elif fate == "lost":
            yield _lost(where)

    def _fate(self, unit: Unit, value: ast.AST, scope: Scope, depth: int) -> str:
        """`used` at once; `returned`; taken by a `loader`; `kept` under a name; or `lost`."""
        parents = unit.parents
        parent = parents.get(value)
        if isinstance(parent, ast.Assign | ast.AnnAssign | ast.AugAssign) and value is parent.value:
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            return _worst(self._target(unit, target, scope, depth) for target in targets)
        if isinstance(parent, ast.Return):
            return self._returned(unit, scope)
        if isinstance(parent, ast.keyword):
            above = parents.get(parent)
            return self._taken(unit, above, parent.arg, scope, depth) if isinstance(above, ast.Call) else "lost"
        if isinstance(parent, ast.Call):
            return self._taken(unit, parent, parent.args.index(value), scope, depth) if value in parent.args else "used"
        if isinstance(parent, ast.arguments):
            return "kept in an argument's default"
        if isinstance(parent, ast.Expr | ast.Compare | ast.BinOp | ast.Subscript | ast.With | ast.withitem):
            return "used"
        if parent is None:  # the value of a module's own name
            return "kept that the module keeps"
        return "lost"

    def _returned(self, unit: Unit, scope: Scope) -> str:
        """A function that is called anew gives a new one; one that remembers what it gave keeps it."""
        if not isinstance(unit.node, ast.FunctionDef) or scope.node is not unit.scope.node:
            return "lost"
        for decorator in unit.node.decorator_list:
            node = decorator.func if isinstance(decorator, ast.Call) else decorator
            for meaning in self._names.expression(Scope(unit.module), node):
                name = meaning.name if isinstance(meaning, External) else "?"
                if name in _REMEMBERED:
                    return f"kept {unit.name}"
                if name not in _PLAIN:
                    return "lost"
        return "returned"

    def _target(self, unit: Unit, target: ast.expr, scope: Scope, depth: int) -> str:
        if isinstance(target, ast.Attribute):
            return f"kept {ast.unparse(target)}"
        if not isinstance(target, ast.Name):
            return "kept in a collection" if isinstance(target, ast.Subscript) else "lost"
        if not isinstance(unit.node, ast.FunctionDef | ast.AsyncFunctionDef):
            return f"kept {target.id}"
        if any(isinstance(n, ast.Global | ast.Nonlocal) and target.id in n.names for n in ast.walk(unit.node)):
            return f"kept {target.id}"
        return self._local(unit, target.id, depth)

    def _local(self, unit: Unit, name: str, depth: int) -> str:
        """What becomes of a generator that a function has under a name."""
        if depth == 0:
            return "lost"
        parents = unit.parents
        fates: list[str] = []
        for node, scope in unit.references:
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if not (isinstance(root, ast.Name) and root.id == name and isinstance(root.ctx, ast.Load)):
                continue
            if scope.node is not unit.scope.node and name not in scope.names and name not in scope.parameters:
                fates.append("lost")  # a nested function holds it
                continue
            if isinstance(node, ast.Attribute):
                call = parents.get(node)
                at_once = isinstance(call, ast.Call) and call.func is node
                fates.append("used" if at_once or isinstance(node.ctx, ast.Store) else "lost")
                continue
            value, used = self._climb(unit, node)
            fates.append("used" if used else self._fate(unit, value, scope, depth - 1))
        return _worst(fates)

    def _taken(self, unit: Unit, call: ast.Call, argument: int | str | None, scope: Scope, depth: int) -> str:
        """What becomes of a generator that is an argument."""
        method = self._own_method(unit, call.func)
        meanings = [method] if method is not None else self._names.expression(scope, call.func)
        fates: list[str] = []
        for meaning in meanings:
            if isinstance(meaning, External):
                fates.append(_by_package(meaning.name))
            elif isinstance(meaning, FunctionSymbol) and not isinstance(meaning.node, ast.Lambda):
                fates.append(self._given(meaning, argument, unit, depth))
            elif isinstance(call.func, ast.Attribute) and not isinstance(meaning, ClassSymbol):
                # A method of a value, such as `tensor.uniform_(generator=g)`: those of tensors keep nothing.
                fates.append("used" if argument == "generator" else "lost")
            else:
                fates.append("lost")
        return _worst(fates) if fates else "lost"

    def _given(self, function: FunctionSymbol, argument: int | str | None, unit: Unit, depth: int) -> str:
        node = function.node
        names = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
        if function.method and isinstance(argument, int):
            argument += 1
        name = names[argument] if isinstance(argument, int) and argument < len(names) else argument
        if not isinstance(name, str):
            return "lost"
        owner = unit.owner if function.method else None
        inner = Unit(function.module, node, Scope(function.module, node), unit.side, owner)
        fate = self._local(inner, name, depth - 1) if depth else "lost"
        return "lost" if fate == "returned" else fate

    def _unseeded(self, call: ast.Call, scope: Scope) -> bool:
        for meaning in self._names.expression(scope, call.func):
            if isinstance(meaning, External) and meaning.name == "random.SystemRandom":
                return True
            if isinstance(meaning, External) and meaning.name in GENERATORS - _ALWAYS_SEEDED:
                given = [*call.args, *(keyword.value for keyword in call.keywords)]
                return all(isinstance(one, ast.Constant) and one.value is None for one in given)
        return False

    def _seeded_anew(self, unit: Unit) -> Iterator[Inexact]:
        parents = unit.parents
        for node, scope in unit.references:
            call = parents.get(node)
            if not isinstance(call, ast.Call) or call.func is not node:
                continue
            for meaning in self._names.expression(scope, node):
                nothing = not call.args and not call.keywords
                if isinstance(meaning, External) and meaning.name in _SEEDING and nothing:
                    yield Inexact(
                        f"{meaning.name}() in {place(unit.module, call)}",
                        why="without a number the operating system seeds the generator, at every start anew",
                        fix="give it a number, or leave it out: run.seed seeds all generators",
                    )

    def _handed_on(self, unit: Unit) -> Iterator[Inexact]:
        """What makes a generator is given to something that will call it: `field(default_factory=default_rng)`."""
        parents = unit.parents
        for node, scope in unit.references:
            call = parents.get(node)
            call = parents.get(call) if isinstance(call, ast.keyword) else call
            if not isinstance(call, ast.Call) or call.func is node:
                continue
            if isinstance(call.func, ast.Name) and call.func.id in ("isinstance", "issubclass", "cast"):
                continue
            if self._makes(unit, node, scope):
                yield _lost(place(unit.module, node))

    # -- generators that are kept

    def _kept(self, unit: Unit, name: str, where: str) -> Iterator[Inexact]:
        owner = unit.owner
        what = f"the random generator {name}" + (f" of {owner.node.name}" if owner is not None else "") + f" in {where}"
        reason = Inexact(what, why="only the global generators are saved", fix=_DRAW)
        if owner is None:
            yield reason
            return
        if self._classes.is_a(owner, _DATAMODULES) and self._only_at_starts(owner, name):
            return
        saves = any(self._classes.has(owner, *methods) for methods in _STATES)
        dataset = self._classes.is_a(owner, MAP_DATASETS - ITERABLE_DATASETS) or self._classes.has(owner, "__getitem__")
        if not saves or (dataset and not self._classes.is_a(owner, ITERABLE_DATASETS)):
            if self._classes.is_a(owner, MODULES):
                do = "draw from torch's own generator, or save its state in on_save_checkpoint and on_load_checkpoint"
                reason = Inexact(what, why=reason.why, fix=do)
            yield reason
        elif self._ranks > 1 and self._classes.has(owner, *_STATES[1]):
            yield Inexact(
                what,
                why="on_save_checkpoint keeps the state of rank 0 for all ranks",
                fix="draw from torch's own generator",
                certain=False,
            )

    def _only_at_starts(self, owner: ClassSymbol, name: str) -> bool:
        """Whether a datamodule uses it only where every start does the same, or gives it to a loader of torch's."""
        attribute = name.rpartition(".")[2]
        for unit in self._reach.units:
            if unit.owner is None or unit.owner not in self._classes.own(owner) or unit.name in _STARTS:
                continue
            parents = unit.parents
            for node in ast.walk(unit.node):
                if isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Load):
                    keyword = parents.get(node)
                    call = parents.get(keyword) if isinstance(keyword, ast.keyword) else None
                    if not isinstance(call, ast.Call) or not self._is_loader(call, unit.scope):
                        return False
        return True

    def _is_loader(self, call: ast.Call, scope: Scope) -> bool:
        meanings = self._names.expression(scope, call.func)
        return all(isinstance(one, External) and _by_package(one.name) == "loader" for one in meanings)


def _lost(where: str) -> Inexact:
    return Inexact(
        f"the random generator made in {where}",
        why="how long it lives cannot be followed; the state of one that outlives a sample is not saved",
        fix=_DRAW,
        certain=False,
    )


def _by_package(name: str) -> str:
    """What a package's function does with a generator that it is given."""
    if name in DATALOADERS or name in STATEFUL_LOADERS or name.endswith("Sampler"):
        return "loader"  # seeded again for each epoch; what validation does with it is the loaders' matter
    if name in GENERATORS:
        return "returned"  # the outer one is looked at
    return "used" if name.startswith(_TAKERS) else "lost"


def _worst(fates: Iterator[str] | list[str]) -> str:
    found = list(fates)
    kept = [fate for fate in found if fate.startswith("kept")]
    if kept:
        return kept[0]
    return next((fate for fate in ("lost", "returned", "loader") if fate in found), "used")
