"""Whether a loader's own state leads back to where it was taken: tried on a copy, beside the training."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from fairlead_distributed.rng import IsolatedGenerators, cpu_states, set_cpu_states

_INSIDE: Final = (1, 3)  # behind so many batches of an iterator: at once, and where a buffer has moved on


class Trial:
    """Each state that is tried has a new copy of the loader, as it was when it was made, go on: as a new process does.

    Attributes:
        why: Why the state does not lead back, or cannot be tried; None: nothing speaks against it so far.
    """

    def __init__(self, loader: Any) -> None:
        self.why: str | None = None
        self._left = {*_INSIDE, 0}
        self._loader = loader
        self._made: Any = None
        try:
            self._made = copy.deepcopy(loader)
        except Exception as error:  # the user's objects: a lock, an open file, whatever they raise
            self._end(f"it cannot be copied, to try it: {type(error).__name__}: {error}")

    @property
    def open(self) -> bool:
        """Whether something was not tried yet."""
        return bool(self._left)

    def wanted(self, batches: int) -> bool:
        """Whether to try the state behind so many batches of an iterator; 0: that behind the epoch before."""
        return batches in self._left

    def follows(self, batches: int, state: Mapping[str, Any], seed: int, drawn: tuple[Any, ...], batch: object) -> None:
        """Whether the batch comes next from that state, with the generators as they were when it was drawn."""
        self._left.discard(batches)
        now = cpu_states()
        try:
            loader = copy.deepcopy(self._made)
            generator = getattr(self._loader, "generator", None)
            if isinstance(generator, torch.Generator) and batches:
                loader.generator.set_state(generator.get_state())
            go_on(loader, state, inside=batches > 0)
            with IsolatedGenerators(seed):
                iterator = iter(loader)
            set_cpu_states(drawn)
            if not _equal(next(iterator, None), batch):
                behind = f"behind batch {batches}" if batches else "behind an epoch"
                self._end(f"a copy that went on from its state {behind} gave another batch")
        except Exception as error:  # the user's and torchdata's code
            self._end(f"a copy could not go on from its state: {type(error).__name__}: {error}")
        finally:
            set_cpu_states(now)
        if not self._left:
            self._made = None

    def _end(self, why: str) -> None:
        self.why, self._left, self._made = why, set(), None


def needs_trial(loader: Any) -> bool:
    """Not where a loader of torchdata's goes through a dataset by index, without workers: that is known to work."""
    dataset = getattr(loader, "dataset", None)
    if getattr(loader, "num_workers", 0):
        return False  # not called exact anyway, and a trial would start workers
    by_index = dataset is not None and not isinstance(dataset, IterableDataset) and not hasattr(dataset, "state_dict")
    return not (by_index and type(loader).__module__.startswith("torchdata.stateful_dataloader"))


def take(loader: Any) -> dict[str, Any]:
    """The loader's state, which nothing changes any more, and the epoch that its dataset was told."""
    epoch = getattr(getattr(loader, "dataset", None), "epoch", None)
    return {"state": copy.deepcopy(loader.state_dict()), "epoch": epoch if isinstance(epoch, int) else None}


def go_on(loader: Any, taken: Mapping[str, Any], *, inside: bool) -> None:
    """Has a loader go on from what `take` gave; inside an epoch, nobody else tells its dataset which it is."""
    tell = getattr(getattr(loader, "dataset", None), "set_epoch", None)
    if inside and callable(tell) and taken.get("epoch") is not None:
        tell(taken["epoch"])
    loader.load_state_dict(taken["state"])


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
