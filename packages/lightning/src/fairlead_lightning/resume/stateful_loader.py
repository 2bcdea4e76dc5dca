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
from fairlead_distributed.rng import IsolatedGenerators
from fairlead_distributed.user_objects import is_stateful

_END: Final = object()


class StatefulLoader:
    """A loader with a state of its own (StatefulDataLoader and the like), carried for each rank, and trusted.

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

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "__len__"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        state = self._resume
        if state is not None and state["state"] is not None and not self._begins_by_generator():
            if self._place().batches:
                self._tell(state["epoch"])
            self.loader.load_state_dict(state["state"])
        self._from, self._fetched, self._before, self._finished = self._place(), 0, None, False
        if state is not None and state["rng"] is not None:
            set_rng_state(state["rng"])  # what the batch that was taken ahead was made with
        with IsolatedGenerators(derive_seed("carried", self._seed, self._from.epoch)):
            iterator = iter(self.loader)  # a state may need more than one iterator
        return self._batches(iterator)

    def _begins_by_generator(self) -> bool:
        """Whether an epoch begins that only the loader's own generator decides; its state would draw from it first."""
        dataset, generator = (getattr(self.loader, name, None) for name in ("dataset", "generator"))
        ordered = not is_stateful(dataset) and not isinstance(dataset, IterableDataset)
        return ordered and isinstance(generator, torch.Generator) and self._place().batches == 0

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        length = sized_len(self)
        while True:
            if length is None:
                self._before = {**self._take(), "rng": rng_state()}
            batch = next(iterator, _END)
            self._finished = batch is _END
            if self._finished:
                return
            self._fetched += 1
            if length is not None and self._from.batches + self._fetched == length:
                # Lightning asks for no more; the state would be one inside this epoch.
                self._finished = next(iterator, _END) is _END
            yield batch

    def _take(self) -> dict[str, Any]:
        """The loader's state, which nothing changes any more, and the epoch that its dataset was told."""
        epoch = getattr(getattr(self.loader, "dataset", None), "epoch", None)
        state = copy.deepcopy(self.loader.state_dict())
        return {"state": state, "epoch": epoch if isinstance(epoch, int) else None, "rng": None}

    def _tell(self, epoch: int | None) -> None:
        """Inside an epoch, nobody else tells the dataset which it is."""
        tell = getattr(getattr(self.loader, "dataset", None), "set_epoch", None)
        if callable(tell) and epoch is not None:
            tell(epoch)

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
            return {"state": None, "epoch": None, "rng": None}  # a limit has cut the epoch: the next one begins anew
        ahead = self._before if inside and self._fetched > place.batches - self._from.batches else None
        return ahead if ahead is not None else self._take()

    def load(self, state: Mapping[str, Any]) -> None:
        """Has the iterators go on there, until `begun`."""
        self._resume = state

    def begun(self) -> None:
        """The training has gone on: the next iterator begins an epoch."""
        self._resume = None


class SizedLoader(StatefulLoader):
    """A carried loader that has a length."""

    def __len__(self) -> int:
        return len(self.loader)
