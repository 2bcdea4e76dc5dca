"""Loaders of an evaluation on several ranks: equal batch counts, each sample once, padding only where it must be."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
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


class EvaluationShard(DistributedSampler[int]):
    """One rank's part of an evaluation, and how it is cut into batches.

    It draws from an `EvaluationSampler`, but a rank that has one sample less than others leaves the padding out of its
    last batch.  Where nothing else would be in that batch, it takes a sample of the batch before it.  Only with
    batches of one sample, or fewer samples than ranks, there is none to take: a batch of padding remains, so that all
    ranks have equal numbers of batches.

    Args:
        length: The number of samples of all ranks.
        num_replicas: The number of parts.
        rank: Which of them.
        batch_size: Samples in a batch, at most.
        order: The indices of the samples in the order in which they are taken; None: 0, 1, ...

    Example:
        >>> shard = EvaluationShard(5, num_replicas=2, rank=1, batch_size=2)
        >>> list(shard), [shard.batch_length(number) for number in range(shard.batches)]
        ([1, 3], [1, 1])
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
        """This rank's indices, the padding last."""
        places = itertools.islice(self._padded, len(self))
        return places if self._order is None else (int(self._order[place]) for place in places)

    def batch_length(self, number: int) -> int:
        """The samples in one batch, padding included.

        Args:
            number: The batch's, from 0 to `batches - 1`.
        """
        if number == self.batches - 1:
            return self._left or 1
        lends = number == self.batches - 2 and self._left == 0 and self._lends
        return self.batch_size - lends

    def is_padding_batch(self, number: int) -> bool:
        """Whether the batch is nothing but padding: whatever is made of it must not count."""
        return 0 <= number == self.batches - 1 and self._left == 0 and not self._lends


class _Batches(BatchSampler):
    """The batches of an `EvaluationShard`."""

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
    """Why `evaluation_loader` leaves this loader as it is; None: it does not.

    Example:
        >>> why_kept(DataLoader(range(3), sampler=EvaluationSampler(3)))
        'it has a sampler of its own, EvaluationSampler'
    """
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
    """The same loader for one rank's part of the samples, each of which is evaluated once: see `EvaluationShard`.

    A loader that shuffles takes the same random order in every evaluation: a mean over all samples does not depend on
    it, and one over some of them (`limit_val_batches`) is of the same samples each time.  `drop_last` leaves out what
    does not fill a batch on each of the ranks.

    Args:
        loader: As the user made it; it stays as it is.
        num_replicas: The number of parts.
        rank: Which of them.

    Returns:
        The loader for this rank; None where it must not be replaced (`why_kept`): its sampler, batch sampler or class
        is the user's own, or its dataset a stream.

    Example:
        >>> loader = evaluation_loader(DataLoader(range(5), batch_size=2), num_replicas=2, rank=1)
        >>> [batch.tolist() for batch in loader]
        [[1], [3]]
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
        return len(sampler), [sampler.indices[place] for place in _shuffled(len(sampler))]
    if type(sampler) is not RandomSampler or sampler.replacement:
        return None
    length = len(sampler.data_source)
    return (len(sampler), _shuffled(length)) if len(sampler) <= length else None


def _shuffled(length: int) -> Any:
    """The same order for all ranks and evaluations."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(0))
