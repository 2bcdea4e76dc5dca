"""Evaluation on several ranks that gives the numbers of one: equal batch counts, padding that weighs nothing."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from fairlead.errors import ConfigError
from fairlead_distributed._sampling import as_dataset, permutation, reducible, shard_and_rank, size_of
from fairlead_distributed.collectives import all_reduce

_NAME = "EvaluationSampler"


class EvaluationSampler(DistributedSampler[int]):
    """Each rank's part of a dataset, in its order, of the same length on all ranks.

    Ranks with unequal numbers of batches wait for each other for ever where a forward pass communicates (FSDP, DDP
    with buffers). So the ranks that would have one sample less take one more, from the start of the dataset, as
    their last. `weights` tells which, and a mean with these weights counts every sample once. The loader must be
    without `drop_last`, which would leave samples out.

    Args:
        dataset_or_length: What is evaluated, or its number of samples.
        num_replicas: The number of ranks; None asks the process group (1 without one).
        rank: This process's rank; None asks the process group (0 without one).

    Raises:
        ConfigError: There is no such rank, or the dataset has no length.
        NotInitializedError: The launcher started several processes, and this one has not joined them yet.

    Example:
        >>> sampler = EvaluationSampler(3, num_replicas=2, rank=1)
        >>> list(sampler), sampler.weights().tolist()
        ([1, 0], [1.0, 0.0])
    """

    def __init__(
        self,
        dataset_or_length: Sized | Dataset[Any] | int,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        num_replicas, rank = shard_and_rank(num_replicas, rank, _NAME)
        self.length = size_of(dataset_or_length, _NAME)
        super().__init__(as_dataset(dataset_or_length), num_replicas, rank, shuffle=False)

    def __iter__(self) -> Iterator[int]:
        return (position % self.length for position in range(self.rank, self.total_size, self.num_replicas))

    def is_padding(self, position: int) -> bool:
        """Whether the sample at this position of the rank's own sequence (0 to `len(sampler) - 1`) is padding."""
        if not 0 <= position < self.num_samples:
            raise ConfigError(
                f"there is no sample {position}", where=_NAME, why=f"this rank has {self.num_samples} samples"
            )
        return self.rank + position * self.num_replicas >= self.length

    def weights(self) -> Tensor:
        """1 for a sample, 0 for padding: float32, shape `(len(sampler),)`. Over all ranks the sum is the length."""
        positions = torch.arange(self.num_samples) * self.num_replicas + self.rank
        return (positions < self.length).to(torch.float32)

    def batch_weights(self, batch_idx: int, batch_size: int) -> Tensor:
        """The weights of one batch, numbered from 0, shape `(samples in it,)`; `batch_size` is the loader's."""
        return self.weights()[batch_idx * batch_size : (batch_idx + 1) * batch_size]


def weighted_mean(
    value_sum: Tensor | float, weight: Tensor | float, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The sum of all ranks' value sums, divided by the sum of their weights; float64, NaN where all weights are 0.

    A collective. The mean of the ranks' means is another number where the ranks have unequal numbers of samples.

    Args:
        value_sum: This rank's sum over its samples (padding left out), a scalar or one value per class or channel.
        weight: This rank's number of samples, a scalar or of the same shape.

    Example:
        >>> weighted_mean(6.0, 4)
        tensor(1.5000, dtype=torch.float64)
    """
    total, count = (reducible(torch.as_tensor(one), group) for one in (value_sum, weight))
    count = count.to(total.device)
    of_one_shape = [total + torch.zeros_like(count), count + torch.zeros_like(total)]
    sums = all_reduce(torch.stack(of_one_shape), group=group)
    return sums[0] / sums[1]


class SampleWeightedMean:
    """The mean of a metric over all samples of all ranks; padding has the weight 0 and is not looked at.

    Sums are kept in float64 where the values are, and travel once, in `compute`. Sums of integers (accuracy) are
    exact; others equal a single process's up to the order of the additions, about 1e-15.

    Example:
        >>> mean = SampleWeightedMean()
        >>> mean.update(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([1.0, 1.0, 0.0]))
        >>> mean.compute()
        2.0
    """

    def __init__(self, *, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.reset()

    def reset(self) -> None:
        """Forgets all values."""
        self._sum = self._weight = torch.zeros((), dtype=torch.float64)

    def update(self, values: Tensor | float, weights: Tensor | float = 1.0) -> None:
        """Adds one batch. No collective, and no wait for a GPU.

        Args:
            values: One value per sample, shape `(samples,)`; or a mean over samples, a scalar.
            weights: One per value: `EvaluationSampler.batch_weights`; for a mean, the number of its samples.

        Raises:
            ConfigError: The shapes differ.
        """
        values = torch.as_tensor(values).detach()
        wide = (values.cpu() if values.device.type == "mps" else values).to(torch.float64)
        weights = torch.as_tensor(weights, dtype=torch.float64, device=wide.device)
        if weights.ndim and weights.shape != wide.shape:
            raise ConfigError(
                f"values of shape {tuple(wide.shape)} with weights of shape {tuple(weights.shape)}",
                where="SampleWeightedMean.update",
                fix="give one weight per value; reduce a loss with reduction='none'",
            )
        weights = weights.expand_as(wide)
        # Not a product with 0: what a model makes of padding may be NaN.
        self._sum = self._sum.to(wide.device) + torch.where(weights > 0, wide * weights, 0.0).sum()
        self._weight = self._weight.to(wide.device) + weights.sum()

    def compute(self) -> float:
        """The mean over all ranks, the same on each; NaN where there is no sample. A collective."""
        return float(weighted_mean(self._sum, self._weight, group=self._group))


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
        positions = itertools.islice(self._padded, len(self))
        return positions if self._order is None else (int(self._order[at]) for at in positions)

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


def why_unchanged(loader: object) -> str | None:
    """Why `evaluation_loader` leaves this loader as it is; None: it does not."""
    kind: Any = type(loader)
    if not isinstance(loader, DataLoader):
        return f"{kind.__name__} is not a torch DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return f"its dataset {type(loader.dataset).__name__} is a stream, which shards itself"
    if kind.__iter__ is not DataLoader.__iter__ or kind.__len__ is not DataLoader.__len__:
        return f"{kind.__name__} overrides how batches are drawn"
    if type(loader.batch_sampler) not in (BatchSampler, type(None)):
        return f"it has a custom batch sampler, {type(loader.batch_sampler).__name__}"
    sampler = _sampler(loader)
    return None if _taken(sampler) is not None else f"it has a custom sampler, {type(sampler).__name__}"


def evaluation_loader(loader: DataLoader[Any], num_replicas: int, rank: int) -> DataLoader[Any] | None:
    """A copy of a loader for one rank's part of the samples (`EvaluationShard`); None where it stays as it is.

    A loader that shuffles takes the same random order in every evaluation, so that `limit_val_batches` always means the
    same samples. `drop_last` leaves out what does not fill a batch on each of the ranks.
    """
    if why_unchanged(loader) is not None:
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
        return len(sampler), [sampler.indices[at] for at in permutation(len(sampler), seed=0)]
    if type(sampler) is not RandomSampler or sampler.replacement:
        return None
    length = len(sampler.data_source)
    return (len(sampler), permutation(length, seed=0).tolist()) if len(sampler) <= length else None
