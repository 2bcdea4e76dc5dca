"""The batches of a run: from where it stopped, so that an interrupted epoch leaves no trace in the random numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

import torch
from torch.utils.data import DataLoader

from fairlead.errors import CheckpointError, ConfigError
from fairlead.findings import Inexact
from fairlead_distributed._sampling import derive_seed
from fairlead_distributed._sharded import is_dtensor, is_fully_sharded
from fairlead_distributed.attributes import Attributes
from fairlead_distributed.batch_order import EpochPosition, ShardedOrder
from fairlead_distributed.info import get_rank, get_world_size
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
from fairlead_distributed.plain_data import from_plain, is_stateful, to_plain
from fairlead_distributed.rng import isolated_rng
from fairlead_distributed.run.registry import Layout, Registry

Kind = Literal["ordered", "stateful", "anew"]


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

    def __init__(self, name: str, saved: Mapping[str, Any] | None, *, same_ranks: bool) -> None:
        self.name = name
        self.epoch = int(saved["epoch"]) if saved is not None else 0
        self.batches = int(saved["batches"]) if saved is not None else 0
        self.over = bool(saved["over"]) if saved is not None else False
        self.running = self.passed = False
        self.replicas: Replicas | None = None
        self.inexact: Inexact | None = None
        self._saved = saved
        self._same_ranks = same_ranks
        self._given: Any = None
        self._ready: Any = None
        self._kind: Kind = "anew"

    @property
    def loader(self) -> Any:
        """What the batches come from."""
        return self._ready

    def prepare(self, loader: Any, seed: int, replicas: Replicas | None, attributes: Attributes) -> None:
        """Makes a loader ready; the same one as before stays as it is. What its dataset keeps is watched, and restored.

        A map-style dataset behind torch's own samplers is read in an order that is made of seed and epoch, divided over
        the `replicas`. A loader with a `state_dict` is trusted. Another one begins its epoch anew.

        Raises:
            ConfigError: Which ranks take different batches is not known.
            CheckpointError: The checkpoint is of a loader of another kind, or of other data.
        """
        if loader is self._given:
            return
        self._given, self.inexact = loader, None
        watch_loader(attributes, f"loader {self.name}", loader)
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
                copied=lambda: attributes.fingerprint(copied),
                persistent=loader.persistent_workers,
            )
        if order is not None:
            self.replicas = Replicas(order.sampler.num_replicas, order.sampler.rank)
            self._ready, self._kind = over(loader, order, seed), "ordered"
        elif is_stateful(loader):
            self._ready, self._kind = loader, "stateful"
            self.inexact = next(may_differ(loader), None)
        else:
            self._ready, self._kind = loader, "anew"
            self.inexact = begins_anew(loader)
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
            elif self.inexact is None:
                self.inexact = begins_anew(self._ready)
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
            raise ConfigError(
                f"the loader {self.name!r} gave no batch",
                where="Run.batches()",
                why="its dataset is empty, or drop_last leaves nothing of what this rank has of it",
                fix="more samples, a smaller batch size, or drop_last=False",
            )
        self.over, self.running = True, False

    def next_epoch(self) -> None:
        """Goes to the beginning of the next epoch."""
        if self._saved is not None:  # this start has not read it: the rest of that epoch is left out
            self._saved = {**self._saved, "state": self._at_beginning(self._saved)}
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
        return {**position, "kind": self._kind, "state": state}


def _known(replicas: Replicas | None) -> Replicas:
    if replicas is None:
        raise ConfigError(
            "which ranks take the same batches is not known",
            where="Run.batches()",
            why="the model is split in more ways than over the data-parallel ranks",
            fix="DataLoader(..., sampler=ResumableDistributedSampler(dataset, num_replicas=..., rank=...))",
        )
    return replicas
