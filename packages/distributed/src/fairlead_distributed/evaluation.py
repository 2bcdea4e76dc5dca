"""Evaluation on several ranks that gives the numbers of one: equal batch counts, padding that weighs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from fairlead.errors import ConfigError
from fairlead_distributed._sampling import as_dataset, place, reducible, size_of
from fairlead_distributed.collectives import all_reduce

_NAME = "EvaluationSampler"


class EvaluationSampler(DistributedSampler[int]):
    """Each rank's part of a dataset, in its order, of the same length on all ranks.

    Ranks with unequal numbers of batches wait for each other for ever where a forward pass communicates (FSDP, DDP
    with buffers). So the ranks that would have one sample less take one more, from the start of the dataset again, as
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
        num_replicas, rank = place(num_replicas, rank, _NAME)
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

    Sums are kept in float64 where the values are, and travel once, in `compute`. Sums of whole numbers (accuracy) are
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
