"""Loaders that have a state of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import IterableDataset

from fairlead_distributed import derive_seed, rng_state, set_rng_state
from fairlead_distributed.batch_order import EpochPosition
from fairlead_distributed.rng import IsolatedGenerators, cpu_states
from fairlead_distributed.user_objects import is_stateful
from fairlead_lightning.resume.tried import Trial, begin_as, beginning, go_on, leave_out, needs_trial, take

_END: Final = object()


class StatefulLoader:
    """A loader with a state of its own (StatefulDataLoader and the like), carried for each rank.

    Lightning takes one batch ahead of a loader without a length; the state before that batch is kept for it.
    """

    def __init__(self, loader: Any, seed: int, place: Callable[[], EpochPosition]) -> None:
        self.loader = loader
        self._seed = seed
        self._place = place
        self._finished = False
        self._resume: Mapping[str, Any] | None = None
        self._from = EpochPosition(-1, 0)
        self._fetched = 0
        self._before: dict[str, Any] | None = None
        self._behind: dict[str, Any] | None = None
        self._begun: dict[str, Any] = {}
        self._replayed = False
        self.trial = Trial(loader) if needs_trial(loader) else None

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "__len__"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        state = self._resume
        skip = state.get("skip") if state is not None else None
        if state is not None and skip is not None:
            begin_as(self.loader, state["begun"])
        elif state is not None and state["state"] is not None and not self._begins_by_generator():
            go_on(self.loader, state, inside=self._place().batches > 0)
        self._from, self._fetched, self._before, self._finished = self._place(), 0, None, False
        self._replayed = bool(skip)
        if self.trial is not None:
            self._begun = beginning(self.loader)
        if state is not None and state["rng"] is not None:
            set_rng_state(state["rng"])  # what the batch that was taken ahead was made with
        with IsolatedGenerators(self._seed_of_epoch()):  # a state may need more than one iterator
            iterator = iter(self.loader)
            if state is not None and skip:
                leave_out(iterator, skip, state["begun"])
                self._begun["drawn"] = state["begun"]["drawn"]
        return self._batches(iterator)

    def _seed_of_epoch(self) -> int:
        return derive_seed("carried", self._seed, self._from.epoch)

    def _begins_by_generator(self) -> bool:
        """Whether an epoch begins that only the loader's own generator decides; its state would draw from it first."""
        dataset, generator = (getattr(self.loader, name, None) for name in ("dataset", "generator"))
        ordered = not is_stateful(dataset) and not isinstance(dataset, IterableDataset)
        return ordered and isinstance(generator, torch.Generator) and self._place().batches == 0

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        length = sized_len(self)
        behind, self._behind = self._behind, None
        while True:
            tries = self.trial is not None and self.trial.wanted(self._fetched) and self._from.batches == 0
            now = take(self.loader) if length is None or (tries and self._fetched) else None
            if length is None and now is not None:
                self._before = {**now, "rng": rng_state()}
            drawn = cpu_states()
            if self.trial is not None and self._begun["drawn"] is None:
                self._begun["drawn"] = drawn
            batch = next(iterator, _END)
            self._finished = batch is _END
            if self._finished:
                break
            state = now if self._fetched else behind
            if tries and state is not None and self.trial is not None:
                self.trial.follows(self._fetched, state, self._begun, self._seed_of_epoch(), drawn, batch)
            self._fetched += 1
            if length is not None and self._from.batches + self._fetched == length:
                # Lightning asks for no more; the state would be one inside this epoch.
                self._finished = next(iterator, _END) is _END
                self._keep_end()
            yield batch
        self._keep_end()

    def _keep_end(self) -> None:
        """The state behind an epoch, for the next one to try."""
        if self._finished and self.trial is not None and self.trial.wanted(0):
            self._behind = take(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: Lightning would carry that of rank 0 for all."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing."""

    def taken(self) -> dict[str, Any]:
        """The state behind the last batch that was trained on."""
        place = self._place()
        inside = place.epoch == self._from.epoch
        if not inside and not self._finished:
            return {"state": None, "rng": None}  # a limit has cut the epoch: the next one does not go on in it
        ahead = self._before if inside and self._fetched > place.batches - self._from.batches else None
        if self._replays(inside) and self.trial is not None:
            begun, skip = (self._begun, place.batches) if inside else (beginning(self.loader), 0)
            why = self.trial.not_by_state
            rng = ahead["rng"] if ahead is not None else None
            return {"state": None, "rng": rng, "begun": copy.deepcopy(begun), "skip": skip, "why": why}
        return ahead if ahead is not None else {**take(self.loader), "rng": None}

    def _replays(self, inside: bool) -> bool:
        """Whether a resume begins the epoch again: in the first one also before the trials, as that leads back there.

        An epoch that was continued so has to be again.
        """
        if self.trial is None or self.trial.why is not None:
            return False
        untried = self.trial.open_inside and (self._replayed or self._from == (0, 0))
        return self.trial.replays or (inside and untried)

    def load(self, state: Mapping[str, Any]) -> None:
        """Has the iterators go on there, until `begun`."""
        self._resume = state
        if self.trial is not None:
            self.trial.not_by_state = state.get("why")

    def begun(self) -> None:
        """The training has gone on: the next iterator begins an epoch."""
        self._resume = None


class SizedLoader(StatefulLoader):
    """A carried loader that has a length."""

    def __len__(self) -> int:
        return len(self.loader)
