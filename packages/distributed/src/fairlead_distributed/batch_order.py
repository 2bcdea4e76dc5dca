"""The batches of a map-style loader, from any position of an epoch on, as an undisturbed run draws them."""

from __future__ import annotations

import copy
import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch.utils.data import BatchSampler

from fairlead_distributed import ResumableDistributedSampler, derive_seed
from fairlead_distributed.loader_workers import EpochBatch
from fairlead_distributed.rng import IsolatedGenerators

_OWN: Final = ("inner", "seed", "generator")


class EpochPosition(NamedTuple):
    """Where the training is: batches of this rank that it took in an epoch."""

    epoch: int
    batches: int


class Order(ABC):
    """Stands in a loader where its batch sampler was, and begins every epoch by its number and `seed` alone.

    A loader that is shorter than its epoch (several loaders at once) is repeated: each turn has another order.
    `position` gives where the training is; `generator` is the loader's, which seeds its workers; `once` whether a
    longer epoch continues without this loader instead of repeating it. `copied` fingerprints what this epoch began
    with and a resumed one would have as it is at the stop: the workers' copies, the weights of a sampler; `persistent`
    workers begin once.
    """

    def __init__(
        self,
        inner: Any,
        *,
        seed: int,
        position: Callable[[], EpochPosition],
        generator: torch.Generator,
        once: Callable[[], bool] = lambda: False,
        copied: Callable[[], object] = lambda: None,
        persistent: bool = False,
    ) -> None:
        self.inner = inner
        self.seed = seed
        self.generator = generator
        self._copied = copied
        self._persistent = persistent
        self._began_with: object = None
        self._position = position
        self._once = once
        self._resume: Mapping[str, Any] | None = None
        self._resumed_in = -1
        self._turn = 0

    def __getattr__(self, name: str) -> Any:
        # A user's code finds its batch sampler here: `trainer.train_dataloader.batch_sampler.set_stage(2)`.
        if name == "inner" or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in _OWN or name.startswith("_") or hasattr(type(self), name)
        object.__setattr__(self if own else self.inner, name, value)

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch, where the batch sampler says it."""
        size = getattr(self.inner, "batch_size", None)
        return size if isinstance(size, int) else None

    @property
    def sampler(self) -> Any:
        """The sampler of the batch sampler; Lightning tells it the epoch."""
        return getattr(self.inner, "sampler", None)

    @property
    def drop_last(self) -> bool:
        """Whether a last batch that is not full is left out."""
        return bool(getattr(self.inner, "drop_last", False))

    def __len__(self) -> int:
        """The batches of a full epoch, wherever it continues: Lightning counts up to it from its own progress."""
        return len(self.inner)

    def __iter__(self) -> Iterator[EpochBatch]:
        position = self._position()
        if self._began_with is None or not self._persistent:
            self._began_with = self._copied()
        # Seeded before the loader draws its workers' seed from it.
        self.generator.manual_seed(derive_seed("workers", *self._numbers(position)))
        return self._batches()  # begins with the first batch: a loader with workers asks twice for an iterator

    @property
    def changed(self) -> bool:
        """Whether what the epoch began with has changed since."""
        inside = self._persistent or self._position().batches > 0
        return inside and self._began_with is not None and self._began_with != self._copied()

    def _batches(self) -> Iterator[EpochBatch]:
        position = self._position()
        numbers = self._numbers(position)
        self._turn = numbers[-1]
        for wanted in (self.inner, self.sampler):
            set_epoch = getattr(wanted, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(position.epoch)  # Lightning does it too late: the workers draw ahead
        for batch in self._begin(numbers, position, self._resume_state(position)):
            yield EpochBatch.of(batch, position.epoch)

    def _resume_state(self, position: EpochPosition) -> Mapping[str, Any] | None:
        """The state to resume from; one that was saved behind an epoch's last batch is not of the next epoch."""
        return self._resume if position.epoch == self._resumed_in else None

    def _numbers(self, position: EpochPosition) -> tuple[int, int, int]:
        """What the order is made of: seed, epoch, and how often the loader was gone through in it."""
        state = self._resume_state(position)
        return self.seed, position.epoch, self._turns(position.batches)[0] if state is None else int(state["turn"])

    def _turns(self, batches: int) -> tuple[int, int]:
        """Whole turns and batches of the next one; asked for more than it has in one epoch, a loader begins again."""
        try:
            length = len(self)
        except TypeError:  # a sampler need not say how long it is
            return 0, batches
        return (0, batches) if self._once() else divmod(batches, max(length, 1))

    def state_dict(self) -> dict[str, Any]:
        """Where the training is, in terms of this order.  A turn that is over is the next one's beginning."""
        position = self._position()
        state = self._resume_state(position)
        # A validation that was due can be rerun, and saved behind, before the first batch is requested.
        return dict(state) if state is not None else self._taken(position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has the iterators continue there, until `begun`."""
        self._resume, self._resumed_in = dict(state), self._position().epoch

    def begun(self) -> None:
        """The training has taken a batch since: the next iterator begins an epoch."""
        self._resume, self._resumed_in = None, -1

    @abstractmethod
    def _taken(self, position: EpochPosition) -> dict[str, Any]:
        """The state behind the last batch that was trained on."""

    @abstractmethod
    def _begin(
        self, numbers: tuple[int, int, int], position: EpochPosition, state: Mapping[str, Any] | None
    ) -> Iterator[Any]:
        """The batches of a turn, from `state` where there is one."""


class ShardedOrder(Order):
    """The batches of a `ResumableDistributedSampler`: any number of ranks continues with exactly what is left."""

    def __init__(self, inner: BatchSampler, **arguments: Any) -> None:
        super().__init__(inner, **arguments)
        sampler = inner.sampler
        assert isinstance(sampler, ResumableDistributedSampler)
        self._sampler = sampler
        self._from = EpochPosition(0, 0)
        self._consumed = 0

    def _taken(self, position: EpochPosition) -> dict[str, Any]:
        turn, consumed = 0, 0
        if position.epoch == self._from.epoch and position.batches >= self._from.batches:  # else between two epochs
            size = self.batch_size
            assert size is not None
            turn = self._turn
            consumed = self._consumed + (position.batches - self._from.batches) * size * self._sampler.num_replicas
            if self.batches_left(consumed) == 0 and not self._once():
                turn, consumed = turn + 1, 0
        return {"turn": turn, "consumed": consumed, "length": self._sampler.length, "seed": self.seed}

    def batches_left(self, consumed: int) -> int:
        """This rank's batches to the end of the turn, when all ranks together have taken so many samples from it."""
        sampler, size = self._sampler, self.batch_size
        assert size is not None
        left = max(0, sampler.length - consumed)
        share = left // sampler.num_replicas if sampler.drop_last else -(-left // sampler.num_replicas)
        return share // size if self.drop_last else -(-share // size)

    def _begin(
        self, numbers: tuple[int, int, int], position: EpochPosition, state: Mapping[str, Any] | None
    ) -> Iterator[Any]:
        seed, epoch, turn = numbers
        self._from, self._consumed = position, int(state["consumed"]) if state is not None else 0
        self._sampler.seed = seed if turn == 0 else derive_seed("turn", seed, turn)
        self._sampler.set_epoch(epoch + 1)  # away from a position that an earlier iterator has left
        self._sampler.set_epoch(epoch)
        if self.batches_left(self._consumed) == 0:
            return iter(())
        self._sampler.consumed = self._consumed
        return iter(self.inner)


class ReplayedOrder(Order):
    """The batches of any other sampler or batch sampler: redrawn from a seed of the epoch, the first ones skipped.

    What it draws comes from generators of this order; its own `torch.Generator` is seeded for each epoch. One with
    `state_dict` and `load_state_dict` (`stateful`) begins the epoch with the state that it had when the epoch began.
    """

    def __init__(self, inner: Any, stateful: Any = None, **arguments: Any) -> None:
        super().__init__(inner, **arguments)
        self._stateful = stateful
        self._began: tuple[int, int, Any] = (-1, -1, None)  # epoch, turn, and the state then

    @property
    def is_stateful(self) -> bool:
        """Whether drawing from it moves it further."""
        return self._stateful is not None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has the iterators continue there, until `begun`."""
        super().load_state_dict(state)
        if self.is_stateful:
            self._stateful.load_state_dict(state["began"])

    def _taken(self, position: EpochPosition) -> dict[str, Any]:
        turn, skip = self._turns(position.batches)
        inside = self._began[:2] == (position.epoch, turn)  # not between two epochs
        return {"turn": turn, "skip": skip, "began": self._began[2] if inside else self._state()}

    def _state(self) -> Any:
        return copy.deepcopy(self._stateful.state_dict()) if self.is_stateful else None

    def _begin(
        self, numbers: tuple[int, int, int], position: EpochPosition, state: Mapping[str, Any] | None
    ) -> Iterator[Any]:
        if not self.is_stateful:
            for wanted in (self.inner, self.sampler):
                generator = getattr(wanted, "generator", None)
                if isinstance(generator, torch.Generator):
                    generator.manual_seed(derive_seed("sampler", *numbers))
        elif state is not None:
            self._stateful.load_state_dict(state["began"])  # once more where an iterator was made before this one
        self._began = position.epoch, numbers[-1], self._state()
        skip = int(state["skip"]) if state is not None else 0
        return self._drawn(derive_seed("order", *numbers), skip)

    def _drawn(self, seed: int, skip: int) -> Iterator[Any]:
        batches = drawn_apart(self.inner, seed)
        try:
            length = len(self)
        except TypeError:  # it does not say how long it is
            length = sys.maxsize
        for number, batch in enumerate(itertools.islice(batches, length), start=1):
            if number == length and self.is_stateful:
                # No batch after the last one is requested, and many samplers begin their next epoch behind their last
                # `yield`; one that has another batch gets it back.
                state = self._state()
                if next(batches, _END) is not _END:
                    self._stateful.load_state_dict(state)
            if number > skip:
                yield batch


def drawn_apart(batches: Any, seed: int) -> Iterator[Any]:
    """The batches, drawn with global generators of their own: what the model draws between two does not matter."""
    apart = IsolatedGenerators(seed)
    with apart:
        iterator = iter(batches)
    while True:
        with apart:
            batch = next(iterator, _END)
        if batch is _END:
            return
        yield batch


_END: Final = object()
