"""Loaders of an evaluation on several ranks: equal batch counts, each sample once, padding only where it must be."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from fairlead_distributed import EvaluationSampler
from fairlead_distributed._sampling import permutation


class EvaluationShard(DistributedSampler[int]):
    """One rank's part of an evaluation: an `EvaluationSampler` whose last batch leaves the padding out.

    Where that would be empty, it takes a sample of the batch before it. Only with batches of one sample, or fewer
    samples than ranks, a batch of padding remains, so that all ranks have equal numbers of batches.
    """

    def __init__(
        self, length: int, *, num_replicas: int, rank: int, batch_size: int, order: Sequence[int] | None = None
    ) -> None:
        self._padded = EvaluationSampler(length, num_replicas=num_replicas, rank=rank)
        super().__init__(self._padded.dataset, num_replicas, rank, shuffle=False)
        self.batch_size = batch_size
        self.batches = -(-len(self._padded) // batch_size)
        self._samples = len(range(rank, length, num_replicas))  # without the padding
        self._left = self._samples - batch_size * (self.batches - 1)  # for the last batch when all before it are full
        self._lends = batch_size > 1 and self.batches > 1  # the last batch but one
        self._order = order

    def __len__(self) -> int:
        """How many indices it draws: those of its samples, and one where a batch of padding remains."""
        return self._samples + self.is_padding_batch(self.batches - 1)

    def __iter__(self) -> Iterator[int]:
        places = itertools.islice(self._padded, len(self))
        return places if self._order is None else (int(self._order[place]) for place in places)

    def batch_length(self, number: int) -> int:
        """The samples in one batch, from 0 to `batches - 1`, padding included."""
        if number == self.batches - 1:
            return self._left or 1
        lends = number == self.batches - 2 and self._left == 0 and self._lends
        return self.batch_size - lends

    def is_padding_batch(self, number: int) -> bool:
        """Whether the batch is nothing but padding: whatever is made of it must not count."""
        return 0 <= number == self.batches - 1 and self._left == 0 and not self._lends


class _Batches(BatchSampler):
    def __init__(self, shard: EvaluationShard) -> None:
        super().__init__(shard, shard.batch_size, drop_last=False)
        self._shard = shard

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self._shard)
        for number in range(len(self)):
            yield list(itertools.islice(indices, self._shard.batch_length(number)))

    def __len__(self) -> int:
        return self._shard.batches


def why_kept(loader: object) -> str | None:
    """Why `evaluation_loader` leaves this loader as it is; None: it does not."""
    kind: Any = type(loader)
    if not isinstance(loader, DataLoader):
        return f"{kind.__name__} is not a torch DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return f"its dataset {type(loader.dataset).__name__} is a stream, which shards itself"
    if kind.__iter__ is not DataLoader.__iter__ or kind.__len__ is not DataLoader.__len__:
        return f"{kind.__name__} draws its batches in a way of its own"
    if type(loader.batch_sampler) not in (BatchSampler, type(None)):
        return f"it has a batch sampler of its own, {type(loader.batch_sampler).__name__}"
    sampler = _sampler(loader)
    return None if _taken(sampler) is not None else f"it has a sampler of its own, {type(sampler).__name__}"


def evaluation_loader(loader: DataLoader[Any], num_replicas: int, rank: int) -> DataLoader[Any] | None:
    """A copy of a loader for one rank's part of the samples (`EvaluationShard`); None where it is to be kept.

    A loader that shuffles takes the same random order in every evaluation, so that `limit_val_batches` always means the
    same samples. `drop_last` leaves out what does not fill a batch on each of the ranks.
    """
    if why_kept(loader) is not None:
        return None
    taken = _taken(_sampler(loader))
    assert taken is not None
    length, order = taken
    batches: Any = loader.batch_sampler
    batch_size = batches.batch_size if batches is not None else 1
    if batches is not None and batches.drop_last:
        length -= length % (batch_size * num_replicas)
    shard = EvaluationShard(length, num_replicas=num_replicas, rank=rank, batch_size=batch_size, order=order)
    made = copy.copy(loader)
    made._iterator = None  # workers that persist draw by the old sampler
    # DataLoader forbids to set these, for iterators that are under way; this one has none.
    object.__setattr__(made, "sampler", shard)
    object.__setattr__(made, "batch_sampler", _Batches(shard) if batches is not None else None)
    return made


def shard_of(loader: object) -> EvaluationShard | None:
    """What this loader draws, if `evaluation_loader` made it."""
    sampler = getattr(loader, "sampler", None)
    return sampler if isinstance(sampler, EvaluationShard) else None


def _sampler(loader: DataLoader[Any]) -> Any:
    """What the indices come from: a batch sampler that the user made has a sampler that the loader does not name."""
    batches: Any = loader.batch_sampler
    return batches.sampler if batches is not None else loader.sampler


def _taken(sampler: Any) -> tuple[int, Sequence[int] | None] | None:
    """How many samples are drawn and in which order, where the sampler says it."""
    if type(sampler) is SequentialSampler:
        return len(sampler), None
    if type(sampler) is SubsetRandomSampler:
        return len(sampler), [sampler.indices[place] for place in permutation(len(sampler), seed=0)]
    if type(sampler) is not RandomSampler or sampler.replacement:
        return None
    length = len(sampler.data_source)
    return (len(sampler), permutation(length, seed=0).tolist()) if len(sampler) <= length else None
