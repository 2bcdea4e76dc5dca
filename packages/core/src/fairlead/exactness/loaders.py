"""Judges what gives the batches: the loader, its sampler and its dataset."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final, Literal

from fairlead.exactness.classes import Classes
from fairlead.exactness.evaluate import Evaluator
from fairlead.exactness.kinds import (
    COMBINED,
    DATALOADERS,
    ITERABLE_DATASETS,
    MAP_DATASETS,
    REDRAWN_SAMPLERS,
    STATEFUL_LOADERS,
    WRAPPING_DATASETS,
    is_known,
)
from fairlead.exactness.names import External, Scope
from fairlead.exactness.values import Call, Constant, Frame, Instance, Items, Thunk, Unknown, Value, Values
from fairlead.findings import Inexact
from fairlead.user_code.symbols import ClassSymbol, FunctionSymbol

__all__ = ["Judge", "Role", "unknown"]

Role = Literal["training", "validation"]
_ARGUMENTS: Final = (
    *("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory"),
    *("drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
)
_STATE: Final = ("state_dict", "load_state_dict")
_GIVE_STATE: Final = "give it state_dict and load_state_dict"
_BATCHES: Final = frozenset(("torch.utils.data.BatchSampler", "torch.utils.data.sampler.BatchSampler"))
_COLLECTIONS: Final = frozenset(f"builtins.{name}" for name in ("dict", "list", "range", "sorted", "tuple", "bytes"))
# What they give may be anything.
_LOADED: Final = ("torch.load", "torch.jit.", "torch.hub.", "torch.package.", "torch.utils.")
_STREAMS: Final = frozenset(("builtins.generator", "builtins.zip", "builtins.map", "builtins.filter"))
_FAIRLEADS: Final = "fairlead_distributed.ResumableDistributedSampler"


def unknown(what: str, why: str, where: str | None = None) -> Inexact:
    """A doubt: a start, which sees the objects themselves, says more."""
    place = f" in {where}" if where else ""
    return Inexact(
        f"{what}{place}", why=why, fix="start it once; `fairlead explain` then says what the start saw", certain=False
    )


class Judge:
    """Says what keeps loaders from being gone on with.

    Args:
        evaluator: Follows the arguments of the loaders.
        ranks: Ranks in all.
        shards: Whether Lightning gives each rank its part of the data.
        draws: Whether the code of the data draws random numbers.
    """

    def __init__(self, evaluator: Evaluator, *, ranks: int, shards: bool, draws: bool) -> None:
        self._evaluator, self._ranks, self._shards, self._draws = evaluator, ranks, shards, draws
        self._seen: dict[tuple[str, int], Instance] = {}

    @property
    def _classes(self) -> Classes:
        return self._evaluator.classes

    # -- loaders

    def loaders(self, values: Values, role: Role) -> Iterator[Inexact]:
        """What is to be said of all that a `train_dataloader` or `val_dataloader` may return."""
        if role == "training" and all(isinstance(value, Constant) for value in values):
            yield unknown("the training loader", "what makes it was not found")
        for value in values:
            yield from self._loader(value, role)

    def _loader(self, value: Value, role: Role) -> Iterator[Inexact]:
        if isinstance(value, Items):
            yield from self.loaders(tuple(value), role)
        elif isinstance(value, Instance):
            if not self._is_new(value, f"loader {role}"):
                return
            if isinstance(value.kind, External):
                yield from self._external(value.kind.name, value, role)
            else:
                yield from self._own(value, value.kind, role)
        elif isinstance(value, Unknown):
            yield unknown(f"the {role} loader", value.why, value.where)
        elif not (isinstance(value, Constant) and value.known and value.value is None):
            yield unknown(f"the {role} loader", "what makes it cannot be followed")

    def _is_new(self, value: Instance, use: str) -> bool:
        """Whether this object was not judged in this use before."""
        fresh = (use, id(value)) not in self._seen
        self._seen[use, id(value)] = value  # kept, so that no other object gets its identity
        return fresh

    def _external(self, name: str, value: Instance, role: Role) -> Iterator[Inexact]:
        where = value.call.where
        if name in DATALOADERS:
            yield from self._torch(value.call, role)
        elif name in STATEFUL_LOADERS:
            yield from self._stateful(value.call, role)
        elif name in COMBINED:
            given = value.call.bind("iterables", "mode").get("iterables")
            if given is None:
                yield unknown(f"the {role} loader", "what CombinedLoader is given cannot be read", where)
            else:
                yield from self.loaders(given(), role)
        elif name in _STREAMS or name.startswith("itertools."):
            if role == "training":
                yield _anew(f"a {value.name}", where)
        elif role == "training" or not name.startswith(("builtins.", "numpy.", "torch.")):
            yield unknown(f"the {role} loader {name}", "what it keeps from batch to batch is not known", where)

    def _own(self, value: Instance, kind: ClassSymbol, role: Role) -> Iterator[Inexact]:
        """A loader class of the user's."""
        if self._classes.has(kind, *_STATE):
            return
        foreign = self._classes.foreign(kind)
        torch = self._classes.is_a(kind, DATALOADERS)
        where = value.call.where
        if torch or self._classes.is_a(kind, STATEFUL_LOADERS):
            changed = [
                name for name in ("__iter__", "_get_iterator", "__new__", *_STATE) if self._classes.has(kind, name)
            ]
            call = self._given(value, kind)
            if changed or call is None:
                what = f"its {changed[0]} is its own" if changed else "what it gives to DataLoader cannot be followed"
                yield unknown(f"the {role} loader {value.name}", what, where)
            else:
                yield from self._torch(call, role) if torch else self._stateful(call, role)
        elif foreign is not None:
            yield unknown(f"the {role} loader {value.name}", f"it derives from {foreign}, which is not read", where)
        elif role == "training":
            yield _anew(value.name, where)

    def _given(self, value: Instance, kind: ClassSymbol) -> Call | None:
        """What a subclass of DataLoader gives to DataLoader."""
        found = self._classes.find(kind, "__init__")
        if not found:
            return value.call
        cls, node = found[0][0], found[0][1].node
        function = FunctionSymbol(cls.module, node, True)  # type: ignore[arg-type]  # a def, by its name
        bound = self._evaluator.bind(function, value.call, value)
        return self._evaluator.super_init(function, Frame(Scope(cls.module, function.node), bound, value, cls))

    def _torch(self, call: Call, role: Role) -> Iterator[Inexact]:
        given = call.bind(*_ARGUMENTS)
        if not call.complete:
            yield unknown(f"the {role} loader", "what its *args or **kwargs hold cannot be read", call.where)
        yield from self._dataset(given.get("dataset"), role, call.where, stateful=False)
        if role == "training":
            yield from self._sampler(given.get("batch_sampler"), "batch sampler", call.where)
            yield from self._sampler(given.get("sampler"), "sampler", call.where)
            yield from self._sizes(given, call.where)
        else:
            yield from self._validated(given, call.where)
        if _may_be(given.get("in_order"), False):
            yield Inexact(
                f"in_order=False of the {role} loader in {call.where}",
                why="batches come in the order in which workers finish them",
                fix="leave in_order out",
            )

    def _sizes(self, given: dict[str, Thunk], where: str) -> Iterator[Inexact]:
        if "batch_size" not in given or _is_given(given.get("batch_sampler")):
            return
        for value in given["batch_size"]():
            if isinstance(value, Constant) and value.known and value.value is None:
                yield Inexact(
                    f"batch_size=None of the training loader in {where}",
                    why="its samples are not counted in batches",
                    fix=f"let the loader make batches, or {_GIVE_STATE}",
                )
            elif isinstance(value, Unknown):
                yield unknown("the batch size of the training loader", f"it may be None: {value.why}", where)

    def _stateful(self, call: Call, role: Role) -> Iterator[Inexact]:
        """torchdata's loader has a state of its own; what its workers draw is not seeded by anyone."""
        given = call.bind(*_ARGUMENTS)
        if not call.complete:
            yield unknown(f"the {role} loader", "what its *args or **kwargs hold cannot be read", call.where)
        yield from self._dataset(given.get("dataset"), role, call.where, stateful=True)
        workers = given.get("num_workers")
        if role == "training" and self._draws and workers is not None and not _is(workers, 0):
            yield unknown(
                "StatefulDataLoader with workers", "random numbers that its workers draw are not seeded", call.where
            )

    def _validated(self, given: dict[str, Thunk], where: str) -> Iterator[Inexact]:
        """Each validation begins anew, so only what outlives one matters."""
        ordered = "shuffle" not in given or _is(given["shuffle"], False)
        if _is_given(given.get("generator")) and not ordered:
            yield unknown(
                "the generator of the validation loader",
                "it goes on from validation to validation, and is in no checkpoint",
                where,
            )
        for name in ("sampler", "batch_sampler"):
            thunk = given.get(name)
            for value in thunk() if thunk is not None else ():
                if isinstance(value, Unknown):
                    yield unknown(f"the {name.replace('_', ' ')} of the validation loader", value.why, value.where)
                elif isinstance(value, Instance) and isinstance(value.kind, External):
                    if _is_given(value.call.keywords.get("generator")):
                        yield unknown(
                            f"the generator of {value.name}", "it goes on from validation to validation", where
                        )
                    elif not is_known(value.kind.name, sys.stdlib_module_names):
                        yield unknown(f"the {value.kind.name} of the validation loader", "it is not read", where)

    # -- samplers

    def _sampler(self, thunk: Thunk | None, word: str, where: str) -> Iterator[Inexact]:
        found = thunk() if thunk is not None else (Constant(),)
        if not found:
            yield unknown(f"the {word} of the training loader", "what makes it was not found", where)
        for value in found:
            if isinstance(value, Constant) and value.known and value.value is None:
                continue
            if isinstance(value, Instance) and isinstance(value.kind, External):
                yield from self._known_sampler(value, value.kind.name, word)
            elif isinstance(value, Instance) and isinstance(value.kind, ClassSymbol):
                yield from self._own_sampler(value, value.kind, word)
            elif isinstance(value, Unknown):
                yield unknown(f"the {word} of the training loader", value.why, value.where or where)
            else:
                yield unknown(f"the {word} of the training loader", "it is no sampler of torch's", where)

    def _known_sampler(self, value: Instance, name: str, word: str) -> Iterator[Inexact]:
        if name in _BATCHES:
            yield from self._sampler(value.call.bind("sampler").get("sampler"), "sampler", value.call.where)
        elif name not in REDRAWN_SAMPLERS and name != _FAIRLEADS:
            yield unknown(f"the {word} {name}", "whether it can be drawn again is not known", value.call.where)

    def _own_sampler(self, value: Instance, kind: ClassSymbol, word: str) -> Iterator[Inexact]:
        what = f"the {word} {value.name} in {value.call.where}"
        foreign = self._classes.foreign(kind, lambda name: name.startswith("torch.utils.data."))
        distributed = self._classes.is_a(
            kind, frozenset(n for n in REDRAWN_SAMPLERS if n.endswith("DistributedSampler"))
        )
        distributed = distributed or self._classes.is_a(kind, frozenset((_FAIRLEADS,)))
        if self._classes.has(kind, *_STATE) or self._classes.is_a(kind, frozenset((_FAIRLEADS,))):
            if self._ranks > 1 and self._shards and not distributed:
                yield Inexact(
                    what,
                    why="Lightning shards it, which hides its state",
                    fix="shard in the sampler (a DistributedSampler, or use_distributed_sampler: false)",
                )
            return
        if foreign is not None:
            yield unknown(what, f"it derives from {foreign}, which is not read")
            return
        yield Inexact(
            what,
            why="it has no state_dict; its batches are drawn again from a seed of the epoch, which is exact only if "
            "they depend on nothing else",
            fix=f"{_GIVE_STATE}, or use ResumableDistributedSampler",
        )

    # -- datasets

    def _dataset(self, thunk: Thunk | None, role: Role, where: str, *, stateful: bool) -> Iterator[Inexact]:
        if thunk is None:
            yield unknown(f"the dataset of the {role} loader", "which it is cannot be read", where)
            return
        found = thunk()
        if all(isinstance(value, Constant) for value in found):
            yield unknown(f"the dataset of the {role} loader", "what makes it was not found", where)
        for value in found:
            yield from self._data(value, role, where, stateful=stateful)

    def _data(self, value: Value, role: Role, where: str, *, stateful: bool) -> Iterator[Inexact]:
        what = f"the dataset of the {role} loader"
        if isinstance(value, Unknown):
            yield unknown(what, value.why, value.where or where)
        elif isinstance(value, Instance) and self._is_new(value, f"dataset {role} {stateful}"):
            if isinstance(value.kind, ClassSymbol):
                yield from self._own_dataset(value, value.kind, role, stateful=stateful)
            else:
                yield from self._known_dataset(value, value.kind.name, role, stateful=stateful)
        elif isinstance(value, Items):
            for one in value:  # a list of samples, or of datasets
                if isinstance(one, Instance | Unknown):
                    yield from self._data(one, role, where, stateful=stateful)
        elif not isinstance(value, Instance) and not (isinstance(value, Constant) and value.known):
            yield unknown(what, "what makes it cannot be followed", where)

    def _known_dataset(self, value: Instance, name: str, role: Role, *, stateful: bool) -> Iterator[Inexact]:
        where = value.call.where
        if name in ITERABLE_DATASETS:
            yield from self._stream(value, role, stateful=stateful, known=False)
        elif name in WRAPPING_DATASETS:
            given = [*value.call.positional, *value.call.keywords.values()]
            for thunk in given if name.endswith("StackDataset") else given[:1]:
                yield from self._dataset(thunk, role, where, stateful=stateful)
        elif name not in MAP_DATASETS and not self._is_plain_data(name):
            yield unknown(f"the dataset {name}", "it is not read", where)

    def _is_plain_data(self, name: str) -> bool:
        """Arrays, lists, and the datasets of torchvision, which are all indexed."""
        if name.startswith("torchvision."):
            return name.startswith("torchvision.datasets.") and "samplers" not in name
        if name.startswith(("builtins.", "torch.")):
            return name in _COLLECTIONS or (name.startswith("torch.") and not name.startswith(_LOADED))
        return name.startswith(("numpy.", "sklearn."))

    def _own_dataset(self, value: Instance, kind: ClassSymbol, role: Role, *, stateful: bool) -> Iterator[Inexact]:
        if self._classes.is_a(kind, ITERABLE_DATASETS):
            yield from self._stream(value, role, stateful=stateful, known=self._classes.has(kind, *_STATE))
            return
        foreign = self._classes.foreign(kind, lambda name: name in MAP_DATASETS or self._is_plain_data(name))
        if foreign is not None:
            because = f"it derives from {foreign}, which is not read"
            yield unknown(f"the dataset {value.name}", because, value.call.where)

    def _stream(self, value: Instance, role: Role, *, stateful: bool, known: bool) -> Iterator[Inexact]:
        what = f"the IterableDataset {value.name}"
        if role == "validation":
            return  # each validation reads it from its start
        if not stateful:
            yield Inexact(
                f"{what} in {value.call.where}",
                why="a stream has no place to go on from: it begins anew",
                fix="use torchdata's StatefulDataLoader with state_dict and load_state_dict in the dataset, or a "
                "dataset with __getitem__ and __len__",
            )
        elif not known:
            yield unknown(
                what, "it has no state_dict; whether it gives the same stream again is not known", value.call.where
            )


def _anew(name: str, where: str) -> Inexact:
    return Inexact(
        f"the training loader {name} in {where}",
        why="it has no state_dict: it begins anew where the run goes on",
        fix=f"{_GIVE_STATE}, or use a torch.utils.data.DataLoader",
    )


def _is(thunk: Thunk, wanted: object) -> bool:
    """Whether a value certainly is this constant."""
    found = thunk()
    return bool(found) and all(isinstance(v, Constant) and v.known and v.value == wanted for v in found)


def _may_be(thunk: Thunk | None, wanted: object) -> bool:
    """Whether a value is, or may be, this constant."""
    if thunk is None:
        return False
    return any(isinstance(v, Constant) and v.known and v.value is wanted for v in thunk())


def _is_given(thunk: Thunk | None) -> bool:
    """Whether an argument may be something other than None."""
    if thunk is None:
        return False
    return any(not (isinstance(v, Constant) and v.known and v.value is None) for v in thunk())
