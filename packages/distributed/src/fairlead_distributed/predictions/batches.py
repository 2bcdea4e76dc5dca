"""Which batches a prediction consists of, and which of them a rank takes: the same batches on any number of ranks.

What a model makes of a sample depends, in its last bits, on the batch in which it is. So batches are not divided,
as the loader would draw them in one process, and a prediction that continues with other ranks has the same bits.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from fairlead.errors import ConfigError
from fairlead_distributed._sampling import derive_seed
from fairlead_distributed.evaluation import EvaluationSampler
from fairlead_distributed.info import get_rank
from fairlead_distributed.objects import broadcast_object, gather_objects
from fairlead_distributed.rng import isolated_rng
from fairlead_distributed.sampler import ResumableDistributedSampler

_WHOLE: Final = (DistributedSampler, EvaluationSampler, ResumableDistributedSampler)
Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Batches:
    """The batches of one loader, by number.

    Attributes:
        ends: Where each batch ends in the order in which samples are drawn.
        size: The samples of a batch; None: the loader makes no batches, and each sample is one.
        order: The indices of the samples in this order; None: 0, 1, 2, ...
    """

    ends: Numbers
    size: int | None
    order: Numbers | None = None

    @classmethod
    def even(cls, samples: int, size: int | None, order: Numbers | None = None) -> Batches:
        """All of one size; the last may have fewer."""
        step = size or 1
        return cls(np.minimum(np.arange(step, samples + step, step), samples), size, order)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> Sequence[int]:
        """The indices of one batch."""
        begin, end = (int(self.ends[number - 1]) if number else 0), int(self.ends[number])
        return range(begin, end) if self.order is None else self.order[begin:end].tolist()

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def first(self, limit: float | None) -> Batches:
        """The first batches of them: a number, or as a float a share of all."""
        count = len(self) if limit is None else int(len(self) * limit) if isinstance(limit, float) else limit
        return Batches(self.ends[:count], self.size, self.order)

    def described(self) -> dict[str, Any]:
        """What tells them from those of another loader, as plain data."""
        described: dict[str, Any] = {"samples": self.samples, "batches": len(self), "batch_size": self.size}
        if self.order is not None:
            content = self.order[: self.samples].tobytes() + self.ends.tobytes()
            described["order"] = hashlib.sha256(content).hexdigest()[:16]
        return described


def batches_of(loader: DataLoader[Any], number: int) -> Batches:
    """The batches of a loader, the same on every rank. A collective where the sampler is not one of torch's.

    `drop_last` is left out. A loader that shuffles is read in the order of the dataset, which is that of predictions.
    What another sampler draws is drawn once, by rank 0 from a fixed seed, and takes 8 bytes a sample.

    Raises:
        ConfigError: The sampler's indices are no integers.
    """
    batches: Any = loader.batch_sampler
    plain = type(batches) in (BatchSampler, type(None))
    sampler: Any = batches.sampler if plain and batches is not None else loader.sampler
    size = batches.batch_size if plain and batches is not None else None
    if plain and (length := _full_length(sampler)) is not None:
        return Batches.even(length, size)
    source = sampler if plain else batches
    seed = derive_seed("prediction", number)
    inner = getattr(source, "sampler", source)
    if isinstance(inner, DistributedSampler) and inner.num_replicas > 1:  # a user's own: each rank draws its part
        with isolated_rng(seed):
            parts = gather_objects(_draw(source, plain))
        drawn = [batch for group in itertools.zip_longest(*parts) for batch in group if batch is not None]
    else:
        with isolated_rng(seed):
            drawn = broadcast_object(_draw(source, plain) if get_rank() == 0 else [])
    return _drawn(drawn, size, type(source).__name__, own_sizes=not plain)


def _draw(source: Iterable[Any], plain: bool) -> list[list[Any]]:
    return [[one] if plain else list(one) for one in source]


def _drawn(drawn: list[list[Any]], size: int | None, name: str, *, own_sizes: bool = False) -> Batches:
    flat = [index for batch in drawn for index in batch]
    odd = next((one for one in flat if isinstance(one, bool) or not hasattr(one, "__index__")), None)
    if odd is not None or any(one < 0 for one in flat):
        what = f"{odd!r}, a {type(odd).__name__}," if odd is not None else str(min(flat))
        raise ConfigError(
            f"{name} gives {what} as the index of a sample",
            where="the loader of a prediction",
            why="predictions are saved and looked up by the index of the sample, an integer from 0 on",
            fix="a sampler that draws numbers from 0 to len(dataset) - 1",
        )
    order = np.fromiter((int(one) for one in flat), dtype=np.int64, count=len(flat))
    if own_sizes:
        return Batches(np.cumsum([*map(len, drawn)], dtype=np.int64), max(map(len, drawn), default=1), order)
    return Batches.even(len(flat), size, order)


def _full_length(sampler: Any) -> int | None:
    """The number of samples, where a sampler draws each of a dataset once, on all ranks together."""
    if type(sampler) is SequentialSampler:
        return len(sampler)
    if type(sampler) is RandomSampler and not sampler.replacement:
        length = len(sampler.data_source)
        return length if len(sampler) == length else None
    return len(sampler.dataset) if type(sampler) in _WHOLE else None


def share(left: Numbers, ranks: int, rank: int) -> list[int | None]:
    """The batches of one rank among those that are left, and None for one of padding.

    All ranks have equally many: where a forward pass communicates, one that had a batch less would keep the others
    waiting for ever. So it does the first one once more, which does not count.
    """
    own: list[int | None] = left[rank::ranks].tolist()
    return own + [None] * (-(-len(left) // ranks) - len(own))


class Drawn:
    """The sampler of a rank's loader; it notes what it has given, for the writer.

    Args:
        batches: Those of the loader.
        numbers: Which of them this rank draws; None: `padding`, which does not count.
    """

    def __init__(self, batches: Batches, numbers: Sequence[int | None], padding: int) -> None:
        self.batches = batches
        self._numbers = numbers
        self._padding = padding
        self._given: deque[tuple[int, Sequence[int]] | None] = deque()

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Any]:
        self._given.clear()
        for number in self._numbers:
            indices = self.batches[number if number is not None else self._padding]
            self._given.append((number, indices) if number is not None else None)
            yield list(indices) if self.batches.size is not None else indices[0]

    def taken(self) -> tuple[int, Sequence[int]] | None:
        """The number and the indices of the next batch that comes out of the loader; None: it is padding."""
        return self._given.popleft()


def is_indexed(loader: object) -> bool:
    """Whether a loader draws samples by their index, as it says itself."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader).__iter__ is DataLoader.__iter__
    )


def drawing(loader: DataLoader[Any], drawn: Drawn) -> DataLoader[Any]:
    """A copy of a loader that draws these batches."""
    made = _in_order(loader)
    # DataLoader forbids to set these, for iterators that are under way; this one has none.
    unbatched = drawn.batches.size is None
    object.__setattr__(made, "sampler" if unbatched else "batch_sampler", drawn)
    return made


def _in_order(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A copy that gives the batches in the order in which they are drawn: their order identifies them."""
    made = copy.copy(loader)
    made._iterator = None  # workers that persist draw by the old sampler
    made.in_order = True
    return made


class Stream:
    """A loader without indices on one rank: its samples are numbered as they come.

    The first `done` batches, with `samples` samples, are redrawn and not given out; where `ended`, nothing is.
    """

    def __init__(self, loader: Iterable[Any], done: int, samples: int, *, limit: int | None, ended: bool) -> None:
        self._loader = _in_order(loader) if isinstance(loader, DataLoader) else loader
        self.batched = not isinstance(loader, DataLoader) or loader.batch_size is not None
        self._limit = limit
        self._ended = ended
        self._done = done
        self._next = (done, samples)

    def __iter__(self) -> Iterator[Any]:
        if not self._ended and (self._limit is None or self._limit > self._done):
            yield from itertools.islice(self._loader, self._done, self._limit)

    def taken(self, samples: int) -> tuple[int, Sequence[int]]:
        """The number and the indices of the next batch, of so many samples."""
        number, begin = self._next
        self._next = (number + 1, begin + samples)
        return number, range(begin, begin + samples)


def require_one_rank(loader: object, ranks: int) -> None:
    """Raises where several ranks draw from a loader whose samples cannot be identified."""
    if ranks == 1:
        return
    stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    what = (
        f"a stream ({type(loader.dataset).__name__})"
        if stream and isinstance(loader, DataLoader)
        else f"a {type(loader).__name__}"
    )
    raise ConfigError(
        f"the predictions of {what} cannot be distinguished on {ranks} ranks",
        where="the loader of a prediction",
        why="its samples have no index, so it is unknown which of them each rank draws",
        fix="predict on one rank (trainer.devices=1), where they are numbered as they come; or use a dataset with "
        "__getitem__ and __len__ in a torch DataLoader",
    )
