"""Whether a loader's own state leads back to where it was taken: tried on a copy, beside the training."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from types import GeneratorType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from fairlead_distributed.plain_data import from_plain, put_back, to_plain
from fairlead_distributed.rng import IsolatedGenerators, cpu_states, set_cpu_states
from fairlead_distributed.worker_seeds import held, own_generators

_INSIDE: Final = (1, 3)  # behind so many batches of an iterator: at once, and where a buffer has moved on
_TORCHDATA: Final = "torchdata.stateful_dataloader"
_DEPTH: Final = 12  # a sampler lies deep in the nodes of torchdata's


class Trial:
    """Each state that is tried has a new copy of the loader, as it was when it was made, go on: as a new process does.

    Where that gives another batch, one begins the epoch again and leaves out what was trained on.

    Attributes:
        why: Why neither leads back, or nothing can be tried; None: nothing speaks against it so far.
        not_by_state: Why the state does not lead back; the epoch is begun again then.
    """

    def __init__(self, loader: Any) -> None:
        self.why: str | None = None
        self.not_by_state: str | None = None
        self._left = {*_INSIDE, 0}
        self._loader = loader
        self._made: Any = None
        try:
            self._made = _copy(loader)
        except Exception as error:  # the user's objects: a lock, an open file, whatever they raise
            self._end(f"it cannot be copied, to try it: {type(error).__name__}: {error}")

    @property
    def open(self) -> bool:
        """Whether something was not tried yet."""
        return bool(self._left)

    @property
    def open_inside(self) -> bool:
        """Whether nothing is known yet of the places inside an epoch."""
        return not self._left.isdisjoint(_INSIDE)

    @property
    def replays(self) -> bool:
        """Whether a resume begins the epoch again, since only that leads back."""
        return self.not_by_state is not None and self.why is None

    def wanted(self, batches: int) -> bool:
        """Whether to try the state behind so many batches of an iterator; 0: that behind the epoch before."""
        return batches in self._left

    def follows(
        self,
        batches: int,
        state: Mapping[str, Any],
        begun: Mapping[str, Any],
        seed: int,
        drawn: tuple[Any, ...],
        batch: object,
    ) -> None:
        """Whether the batch comes next from that state, or behind as many of the epoch that began so.

        The generators are as they were when it was drawn.
        """
        self._left.discard(batches)
        if self.not_by_state is None and (why := self._differs(_by_state, batches, state, seed, drawn, batch)):
            if batches:
                self.not_by_state = why
            else:  # what was saved at the end of the epoch before goes on by that state
                self._end(why)
        if self.not_by_state is not None and self._differs(_by_replay, batches, begun, seed, drawn, batch):
            self._end(f"{self.not_by_state}, and so did one that began the epoch again")
        if not batches and self.why is None:
            self._left.update(_INSIDE)  # of the second epoch, too: a generator has moved on
        if not self._left:
            self._made = None

    def _differs(self, way: Any, batches: int, state: Any, seed: int, drawn: tuple[Any, ...], batch: Any) -> str | None:
        now = cpu_states()
        try:
            loader = _copy(self._made)
            iterator = way(loader, self._loader, batches, state, seed)
            set_cpu_states(drawn)
            if _equal(next(iterator, None), batch):
                return None
            behind = f"behind batch {batches}" if batches else "behind an epoch"
            return f"a copy that went on from its state {behind} gave another batch"
        except Exception as error:  # the user's and torchdata's code
            return f"a copy could not go on from its state: {type(error).__name__}: {error}"
        finally:
            set_cpu_states(now)

    def _end(self, why: str) -> None:
        self.why, self._left, self._made = why, set(), None


def _copy(loader: Any) -> Any:
    """A copy that is to begin an iterator of its own: Lightning has begun one already, which cannot be copied."""
    memo: dict[int, Any] = {}
    for _, one in held(loader, _DEPTH):
        if isinstance(one, (GeneratorType, ModuleType)):
            memo[id(one)] = iter(()) if isinstance(one, GeneratorType) else one
    return copy.deepcopy(loader, memo)


def _by_state(loader: Any, original: Any, batches: int, state: Mapping[str, Any], seed: int) -> Iterator[Any]:
    generator = getattr(original, "generator", None)
    if isinstance(generator, torch.Generator) and batches:
        loader.generator.set_state(generator.get_state())
    go_on(loader, state, inside=batches > 0)
    with IsolatedGenerators(seed):
        iterator: Iterator[Any] = iter(loader)
    return iterator


def _by_replay(loader: Any, _: Any, batches: int, begun: Mapping[str, Any], seed: int) -> Iterator[Any]:
    begin_as(loader, begun)
    with IsolatedGenerators(seed):
        iterator: Iterator[Any] = iter(loader)
        leave_out(iterator, batches, begun)
    return iterator


def beginning(loader: Any) -> dict[str, Any]:
    """What an epoch that begins now depends on beside the loader as it was made."""
    generators = {name: to_plain(one) for name, one in own_generators(loader, _DEPTH).items()}
    return {"epoch": _epoch_of(loader), "generators": generators, "drawn": None}


def begin_as(loader: Any, begun: Mapping[str, Any]) -> None:
    """Has a loader as it was made begin the epoch that began so."""
    _tell(loader, begun["epoch"])
    for name, now in own_generators(loader, _DEPTH).items():
        if name in begun["generators"]:
            put_back(now, from_plain(to_plain(begun["generators"][name])))


def leave_out(iterator: Iterator[Any], batches: int, begun: Mapping[str, Any]) -> None:
    """Draws the batches that were trained on; a sampler draws its order with the first."""
    if batches and begun["drawn"] is not None:
        set_cpu_states(begun["drawn"])
    for _ in range(batches):
        next(iterator, None)


def needs_trial(loader: Any) -> bool:
    """Not where a loader of torchdata's goes through a dataset by index, without workers: that is known to work."""
    dataset = getattr(loader, "dataset", None)
    if getattr(loader, "num_workers", 0):
        return False  # not called exact anyway, and a trial would start workers
    by_index = dataset is not None and not isinstance(dataset, IterableDataset) and not hasattr(dataset, "state_dict")
    sampler = getattr(loader, "sampler", None)
    default = isinstance(sampler, (RandomSampler, SequentialSampler)) or type(sampler).__module__.startswith(_TORCHDATA)
    return not (by_index and default and type(loader).__module__.startswith(_TORCHDATA))


def take(loader: Any) -> dict[str, Any]:
    """The loader's state, which nothing changes any more, and the epoch that its dataset was told."""
    return {"state": copy.deepcopy(loader.state_dict()), "epoch": _epoch_of(loader)}


def go_on(loader: Any, taken: Mapping[str, Any], *, inside: bool) -> None:
    """Has a loader go on from what `take` gave; inside an epoch, nobody else tells its dataset which it is."""
    if inside:
        _tell(loader, taken.get("epoch"))
    loader.load_state_dict(taken["state"])


def _epoch_of(loader: Any) -> int | None:
    epoch = getattr(getattr(loader, "dataset", None), "epoch", None)
    return epoch if isinstance(epoch, int) else None


def _tell(loader: Any, epoch: int | None) -> None:
    tell = getattr(getattr(loader, "dataset", None), "set_epoch", None)
    if callable(tell) and epoch is not None:
        tell(epoch)


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
