"""The batches of a run: from where it stopped, so that an interrupted epoch leaves no trace in the random numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal, cast

import torch
from torch.utils.data import DataLoader

from fairlead.errors import CheckpointError, ConfigError
from fairlead.findings import Inexact
from fairlead_distributed._sampling import derive_seed
from fairlead_distributed._sharded import is_dtensor, is_fully_sharded
from fairlead_distributed.attributes import Attributes
from fairlead_distributed.batch_order import EpochPosition, ShardedOrder
from fairlead_distributed.info import get_rank, get_world_size
from fairlead_distributed.object_fingerprint import fingerprint
from fairlead_distributed.ordered_loader import (
    Replicas,
    begins_anew,
    is_ahead,
    is_ordered,
    may_differ,
    over,
    sharded_order,
    watch_loader,
)
from fairlead_distributed.plain_data import from_plain, held, is_stateful, to_plain
from fairlead_distributed.rng import isolated_rng
from fairlead_distributed.run.registry import Layout, Registry

Kind = Literal["ordered", "stateful", "anew"]
_LONG: Final = 256


def replicas_here(layout: Layout, registry: Registry) -> Replicas | None:
    """Which ranks take different batches; None where the model is split in more ways than over data-parallel ranks."""
    every = Replicas(get_world_size(), get_rank())
    if layout == "replicated":
        return every
    if layout == "stages":
        return None
    parts = [part for module in registry.modules().values() for part in module.modules()]
    tensors = [one for module in registry.modules().values() for one in module.parameters() if is_dtensor(one)]
    cuts = [sum(not placement.is_replicate() for placement in one.placements) for one in tensors]
    if any(map(is_fully_sharded, parts)):
        return every if all(cut == 1 for cut in cuts) else None
    # Tensor parallelism over all ranks: each computes a part of the same batch.
    together = all(one.device_mesh.ndim == 1 and one.device_mesh.size() == every.count for one in tensors)
    return Replicas(1, 0) if together and not registry.is_ddp() else None


class Source:
    """One loader of a run, which is known by its name: each start may make it anew.

    Attributes:
        epoch: The epoch that it is in, from 0.
        batches: The batches of this epoch that this rank has taken; each counts as trained on when it is handed out.
        over: Whether the epoch has no more of them.
        passed: Whether the loop has come to the epoch's end in this start.
    """

    def __init__(self, name: str, saved: Mapping[str, Any] | None, attributes: Attributes, *, same_ranks: bool) -> None:
        self.name = name
        self.epoch = int(saved["epoch"]) if saved is not None else 0
        self.batches = int(saved["batches"]) if saved is not None else 0
        self.over = bool(saved["over"]) if saved is not None else False
        self.running = self.passed = False
        self.replicas: Replicas | None = None
        self._inexact: Inexact | None = None
        self._saved = saved
        self._attributes = attributes
        self._dataset = f"loader {name} dataset"
        self._same_ranks = same_ranks
        self._between = _BetweenEpochs(saved["between"] if saved is not None else None)
        self._given: Any = None
        self._ready: Any = None
        self._kind: Kind = "anew"

    @property
    def loader(self) -> Any:
        """What the batches come from."""
        return self._ready

    def prepare(self, loader: Any, seed: int, replicas: Replicas | None, *, in_epochs: bool) -> None:
        """Makes a loader ready; the same one as before stays as it is. What its dataset keeps is watched, and restored.

        Of an epoch of `run.epochs()` (`in_epochs`) that begins with it, the loop's own settings stay.

        A map-style dataset behind torch's own samplers is read in an order that is made of seed and epoch, divided over
        the `replicas`. A loader with a `state_dict` is trusted. Another one begins its epoch anew.

        Raises:
            ConfigError: It cannot be iterated, or which ranks take different batches is not known.
            CheckpointError: The checkpoint is of a loader of another kind, or of other data.
        """
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise ConfigError(
                f"{loader!r} is given as the loader {self.name!r}", where="Run.batches()", fix="give it a DataLoader"
            )
        begins = in_epochs and not (self.batches or self.over)
        if loader is not self._given:
            restores = self._between.restores if begins else lambda *_: True
            watch_loader(self._attributes, f"loader {self.name}", loader, restores)
        if begins:
            self._between.begins(getattr(loader, "dataset", None), self._attributes.values(self._dataset))
        if loader is self._given:
            return
        self._given, self._inexact = loader, None
        order = None
        if type(loader) is DataLoader and is_ordered(loader):
            copied: list[Any] = [loader.dataset, loader.collate_fn] if is_ahead(loader) else []
            order = sharded_order(
                loader,
                lambda: _known(replicas),
                seed,
                position=lambda: EpochPosition(self.epoch, self.batches),
                generator=torch.Generator(),
                once=lambda: True,  # at its end the epoch is over, also where that is not noticed yet
                copied=lambda: self._attributes.fingerprint(copied),
                persistent=loader.persistent_workers,
            )
        if order is not None:
            self.replicas = Replicas(order.sampler.num_replicas, order.sampler.rank)
            self._ready, self._kind = over(loader, order, seed), "ordered"
        elif is_stateful(loader):
            self._ready, self._kind = loader, "stateful"
            self._inexact = next(may_differ(loader), None)
        else:
            self._ready, self._kind = loader, "anew"
            self._inexact = begins_anew(loader)
        saved, self._saved = self._saved, None
        if saved is not None:
            self._load(saved)

    def _load(self, saved: Mapping[str, Any]) -> None:
        if saved["kind"] != self._kind:
            raise CheckpointError(
                f"the loader {self.name!r} cannot continue where the checkpoint is",
                where="Run.batches()",
                why=f"its position was that of a loader of the kind {saved['kind']!r}, now it is {self._kind!r}",
                fix="give the same loader, or begin a new run: RunConfig(name=..., resume='never')",
            )
        if self._kind == "ordered":
            self._load_order(saved["state"])
        elif self._kind == "stateful" and self._same_ranks:
            if saved["state"] is not None:
                self._ready.load_state_dict(from_plain(saved["state"]))
            elif self._inexact is None:
                self._inexact = begins_anew(self._ready)
        elif not self.over:
            self.batches = 0

    def _load_order(self, state: Mapping[str, Any]) -> None:
        order = cast("ShardedOrder", self._ready.batch_sampler)
        length = order.sampler.length
        if state["consumed"] and state["length"] != length and not self.over:
            raise CheckpointError(
                f"cannot continue within epoch {self.epoch}: the number of samples was {state['length']}, now {length}",
                where="Run.batches()",
                why=f"the {state['consumed']} samples that were trained on are of an order that no longer exists",
                fix="resume with the same data, or from a checkpoint at the end of an epoch",
            )
        order.load_state_dict(state)
        if not self._same_ranks and not self.over:
            self.batches = len(order) - order.batches_left(int(state["consumed"]))

    def begin(self, seed: int, step: int) -> Iterator[Any]:
        """The rest of this epoch's batches; takes nothing from the random generators."""
        self.running = True
        if self._kind == "ordered":
            return iter(self._ready)
        rank = self.replicas.rank if self.replicas is not None else 0
        with isolated_rng(derive_seed("loader", seed, step, rank)):  # a resumed epoch makes one more iterator
            return iter(self._ready)

    def reasons(self) -> Iterator[Inexact]:
        """Why a resume within or behind an epoch of it is not exact, as far as this start has seen."""
        if self._inexact is not None:
            yield self._inexact
        for name in sorted(self._between.unknown):
            yield Inexact(
                name,
                why="the loop sets it before an epoch's batches, and has resumed there: whether it makes it of what it "
                "was is not known",
                fix="make it of the epoch (`dataset.level = epoch`), or count in run.state",
                certain=False,
            )

    @property
    def at_end(self) -> bool:
        """Whether the epoch is known to have no more batches."""
        return self._kind == "ordered" and self.batches >= len(self._ready)

    def took(self) -> None:
        """A batch was taken, and is handed out."""
        self.batches += 1
        if self._kind == "ordered" and self.batches:
            self._ready.batch_sampler.begun()

    def ended(self) -> None:
        """The epoch has no more batches.

        Raises:
            ConfigError: It had none at all: without batches, its epochs would never end.
        """
        if not self.batches:
            once = isinstance(self._given, Iterator)
            raise ConfigError(
                f"the loader {self.name!r} gave no batch" + (f" in epoch {self.epoch}" if once and self.epoch else ""),
                where="Run.batches()",
                why="it is an iterator, which gives its batches once"
                if once
                else "its dataset is empty, or drop_last leaves nothing of what this rank has of it",
                fix="give the loader itself, not iter(), map() or enumerate() of it"
                if once
                else "more samples, a smaller batch size, or drop_last=False",
            )
        self.over, self.running = True, False

    def next_epoch(self) -> None:
        """Goes to the beginning of the next epoch."""
        if self._saved is not None:  # this start has not read it: the rest of that epoch is left out
            self._saved = {**self._saved, "state": self._at_beginning(self._saved)}
        if self._given is not None:
            self._between.ended(self._attributes.values(self._dataset))
        self.epoch, self.batches, self.over = self.epoch + 1, 0, False
        self.passed = False

    def _at_beginning(self, saved: Mapping[str, Any]) -> Any:
        """A saved state, as it is when the next epoch begins; None: only the loader itself could go there."""
        if saved["kind"] == "ordered":
            return {**saved["state"], "consumed": 0}
        return saved["state"] if self.over else None

    def state(self) -> dict[str, Any]:
        """Where it is, as plain data, for a checkpoint of this rank.

        Raises:
            ConfigError: The loader's own state holds what could not be read back.
        """
        if self._given is None and self._saved is not None:  # gave no batches in this start
            return {**copy.deepcopy(dict(self._saved)), "epoch": self.epoch, "batches": self.batches, "over": self.over}
        state: Any = None
        if self._kind == "ordered":
            state = self._ready.batch_sampler.state_dict()
        elif self._kind == "stateful":
            try:
                state = to_plain(self._ready.state_dict(), "its state")
            except TypeError as error:
                raise ConfigError(
                    f"the state of the loader {self.name!r} cannot be saved",
                    where=f"{type(self._ready).__name__}.state_dict()",
                    why=str(error),
                    fix="return numbers, texts, tensors, arrays, and lists and dicts of them",
                ) from error
        position = {"epoch": self.epoch, "batches": self.batches, "over": self.over}
        return {**position, "kind": self._kind, "state": state, "between": self._between.state()}


class _BetweenEpochs:
    """What the loop sets in a dataset before an epoch's batches, as `dataset.level = epoch`, or a dataset for each.

    A checkpoint from the end of an epoch does not have it, and what the resumed loop has set would be lost behind the
    saved value. The values with which the first epoch began show it: what differs from these is set now.

    Args:
        saved: What `state` returned.
    """

    def __init__(self, saved: Mapping[str, Any] | None) -> None:
        self._first: dict[str, Any] | None = dict(saved["first"]) if saved is not None else None
        self._set: set[str] = set(saved["set"]) if saved is not None else set()
        self._anew = bool(saved["anew"]) if saved is not None else False
        self._dataset: object = None
        self._at_end: dict[str, Any] = {}
        self.unknown: set[str] = set()

    def begins(self, dataset: object, values: Mapping[str, Any]) -> None:
        """An epoch begins with these values."""
        now = {name: _comparable(value) for name, value in values.items()}
        if self._first is None:
            self._first = now
        self._anew |= self._dataset is not None and self._dataset is not dataset
        self._dataset = dataset
        self._set |= {name for name, value in self._at_end.items() if now.get(name) != value}

    def ended(self, values: Mapping[str, Any]) -> None:
        """It is over, with these."""
        self._at_end = {name: _comparable(value) for name, value in values.items()}

    def restores(self, name: str, now: Any, saved: Any) -> bool:
        """Whether a dataset's attribute gets its saved value where an epoch begins."""
        first = (self._first or {}).get(name)
        if self._anew or (first is not None and first != _comparable(now)):
            return False
        if name in self._set and _comparable(saved) != first:
            self.unknown.add(name)
        return True

    def state(self) -> dict[str, Any]:
        """As plain data."""
        return {"first": self._first or {}, "set": sorted(self._set), "anew": self._anew}


def _comparable(value: Any) -> int | None:
    """Equal to that of an equal value, also in another process; None: no number would be."""
    if isinstance(value, frozenset) or any(isinstance(one, set) for one in held(value)):
        return None  # the hashes of texts differ, and with them its order
    try:
        found = fingerprint(value if _is_long(value) else to_plain(value, "it"), {})
    except TypeError:
        return None
    return found if isinstance(found, int) else None


def _is_long(value: Any) -> bool:
    """Whether it is a container of many, such as of a dataset's indices: these are read as they are."""
    return isinstance(value, (list, tuple, dict)) and len(value) > _LONG


def _known(replicas: Replicas | None) -> Replicas:
    if replicas is None:
        raise ConfigError(
            "which ranks take the same batches is not known",
            where="Run.batches()",
            why="the model is split in more ways than over the data-parallel ranks",
            fix="DataLoader(..., sampler=ResumableDistributedSampler(dataset, num_replicas=..., rank=...))",
        )
    return replicas
