"""Randomness and statistics that do not depend on how many processes share the work."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence, Sized
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar, overload

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, Subset

from fairlead.errors import ConfigError
from fairlead_distributed._sampling import derive_seed, permutation, reducible, size_of
from fairlead_distributed.collectives import ReduceOp, all_reduce

T = TypeVar("T")


class SampleRNG:
    """One sample's own generators, each made when first used: `python`, `numpy`, `torch` (on the CPU)."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @cached_property
    def python(self) -> random.Random:
        """For code that takes a `random.Random`."""
        return random.Random(self.seed)

    @cached_property
    def numpy(self) -> np.random.Generator:
        """For code that takes a NumPy generator."""
        return np.random.Generator(np.random.PCG64(self.seed))

    @cached_property
    def torch(self) -> torch.Generator:
        """For `torch.rand(..., generator=)`."""
        return torch.Generator().manual_seed(self.seed)


def sample_rng(seed: int, epoch: int, index: int) -> SampleRNG:
    """The generators of one sample in one epoch: the same in any worker, on any rank, before and after a resume.

    The generators of loader workers cannot be saved, and which worker makes a sample depends on where the epoch
    began. What is drawn from (seed, epoch, index) depends on neither.

    Example:
        >>> rng = sample_rng(seed=0, epoch=2, index=41)
        >>> angle = rng.python.uniform(-10, 10)
        >>> noise = torch.randn(3, generator=rng.torch)
        >>> angle == sample_rng(0, 2, 41).python.uniform(-10, 10)
        True
    """
    return SampleRNG(derive_seed("sample", seed, epoch, index))


@overload
def seeded_split(dataset_or_length: int, fractions: Sequence[float], seed: int) -> list[list[int]]: ...
@overload
def seeded_split(
    dataset_or_length: Dataset[T] | Sequence[T], fractions: Sequence[float], seed: int
) -> list[Subset[T]]: ...
def seeded_split(
    dataset_or_length: Dataset[Any] | Sized | int, fractions: Sequence[float], seed: int
) -> list[list[int]] | list[Subset[Any]]:
    """Disjoint random parts of a dataset, the same on every rank and machine, whatever was drawn before.

    Args:
        dataset_or_length: The dataset, or its number of samples.
        fractions: The parts' shares, which sum to 1. Sizes are rounded so that every sample is in one part.
        seed: The same on all ranks.

    Returns:
        One `Subset` per fraction; for a number of samples, one list of indices.

    Raises:
        ConfigError: The fractions do not add up to at most 1, or a part would be empty.

    Example:
        >>> train, val = seeded_split(10, [0.8, 0.2], seed=0)
        >>> len(train), len(val), sorted(train + val) == list(range(10))
        (8, 2, True)
    """
    length = size_of(dataset_or_length, "seeded_split")
    if any(not part > 0 for part in fractions) or not math.isclose(math.fsum(fractions), 1.0, abs_tol=1e-9):
        raise ConfigError(
            f"cannot split into {list(fractions)}", where="seeded_split", fix="give positive fractions that sum to 1"
        )
    # Halves go up, also those that lie a rounding error below: `round` sends them to the even number, and either can
    # leave a part empty.
    shares = (math.fsum(fractions[: i + 1]) for i in range(len(fractions) - 1))
    bounds = [0, *(math.floor(length * (share + 1e-12) + 0.5) for share in shares), length]
    order = permutation(length, derive_seed("split", seed)).tolist()
    parts = [order[start:end] for start, end in pairwise(bounds)]
    if not all(parts):
        raise ConfigError(
            f"a part of {list(fractions)} would be empty", where="seeded_split", why=f"there are {length} samples"
        )
    if isinstance(dataset_or_length, int):
        return parts
    return [Subset(dataset_or_length, part) for part in parts]  # type: ignore[arg-type]  # lists are datasets too


def global_mean_std(
    chunks: Iterable[Tensor],
    *,
    feature_dim: int | None = None,
    correction: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of a dataset that the ranks hold in parts, in float64. A collective.

    Equal to those of all values in one process. Chunks, then ranks are merged as (count, mean, sum of squared
    deviations), which keeps its digits where the mean is far larger than the deviation (pressure in Pa). Source: Chan,
    Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979).

    Args:
        chunks: This rank's tensors, of any dtype; shapes may differ, except the size of `feature_dim`. A rank may
            have none. No sample may be in two ranks' chunks: an `EvaluationSampler` without its padding is such a part.
        feature_dim: The dimension that remains, statistics for each of its entries (1 for channels in NCHW, -1 for
            columns); None takes all values together.
        correction: 0 for the deviation of these values, 1 for the estimate from a sample (`torch.std`'s default).

    Returns:
        `(mean, std)`, shape `(features,)`, or scalars without `feature_dim`.

    Raises:
        ConfigError: There is no value on any rank, or the chunks differ in their number of features.

    Example:
        >>> mean, std = global_mean_std([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
        >>> round(mean.item(), 3), round(std.item(), 3)
        (2.0, 0.816)
    """
    own = _Moments()
    for chunk in chunks:
        if chunk.numel():
            own.add(chunk, feature_dim)
    # A rank without values learns here how many features the others have.
    found = own.mean.numel()
    bounds = torch.tensor([found, -found if found else -(2**53)])
    most, least = all_reduce(reducible(bounds, group), ReduceOp.MAX, group=group).tolist()
    if most == 0:
        raise ConfigError("no values on any rank", where="global_mean_std", fix="give at least one non-empty tensor")
    if most != -least:
        raise _differ(-least, most)
    mean, squares = (reducible(one if found else torch.zeros(int(most)), group) for one in (own.mean, own.squares))
    sums = all_reduce(torch.cat([mean * own.count, mean.new_tensor([own.count])]), group=group)
    mean_of_all, count = sums[:-1] / sums[-1], sums[-1]
    squares = all_reduce(squares + own.count * (mean - mean_of_all).square(), group=group)
    std = (squares / (count - correction)).sqrt()
    return (mean_of_all[0], std[0]) if feature_dim is None else (mean_of_all, std)


class _Moments:
    """Count, mean and sum of squared deviations from it, per feature."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.squares = torch.zeros(0, dtype=torch.float64)

    def add(self, chunk: Tensor, feature_dim: int | None) -> None:
        wide = chunk.detach().to("cpu" if chunk.device.type == "mps" else chunk.device, torch.float64)
        rows = wide.reshape(1, -1) if feature_dim is None else wide.movedim(feature_dim, 0).flatten(1)
        mean, count = rows.mean(1), rows.shape[1]
        squares = (rows - mean[:, None]).square().sum(1)
        if self.count == 0:
            self.count, self.mean, self.squares = count, mean, squares
            return
        if mean.numel() != self.mean.numel():
            raise _differ(self.mean.numel(), mean.numel())
        total, delta = self.count + count, mean - self.mean
        self.squares = self.squares + squares + delta.square() * (self.count * count / total)
        self.mean = self.mean + delta * (count / total)
        self.count = total


def _differ(one: float, other: float) -> ConfigError:
    return ConfigError(
        f"tensors with {one:.0f} and with {other:.0f} features", where="global_mean_std", fix="check feature_dim"
    )
