from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset

from fairlead.errors import ConfigError
from fairlead_distributed import (
    global_mean_std,
    rng_state,
    sample_rng,
    seeded_split,
)
from fairlead_distributed.testing import run_ranks


def draws(seed: int, epoch: int, index: int) -> list[float]:
    rng = sample_rng(seed, epoch, index)
    return [rng.python.random(), float(rng.numpy.random()), torch.rand(1, generator=rng.torch).item()]


def test_a_sample_has_its_own_generators() -> None:
    """Whatever was drawn before; every part of (seed, epoch, index) matters."""
    before = rng_state()
    assert draws(0, 2, 41) == draws(0, 2, 41)
    assert str(rng_state()) == str(before)
    many = [draws(*key) for key in [(0, 2, 41), (1, 2, 41), (0, 3, 41), (0, 2, 42), (0, 241, 0), (2, 4, 1)]]
    for column in zip(*many, strict=True):
        assert len(set(column)) == len(many)


class Noisy(Dataset[torch.Tensor]):
    """A user's augmentation: draws from the global generators, and knows nothing of epochs."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


@settings(max_examples=100, deadline=None)
@given(length=st.integers(0, 50), shares=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(0, 99))
@example(length=9, shares=[2, 2, 9, 2, 3], seed=0)  # 7.5 samples, which are 7.499... in floating point
def test_a_split_is_disjoint_covers_the_set_and_has_the_sizes(length: int, shares: list[int], seed: int) -> None:
    fractions = [share / sum(shares) for share in shares]
    sizes = [fraction * length for fraction in fractions]
    if min(sizes) < 1:  # whether it is rounded to nothing depends on its place
        fractions, sizes = [1.0], [length]
    if length == 0:
        with pytest.raises(ConfigError, match="would be empty"):
            seeded_split(length, fractions, seed)
        return
    parts = seeded_split(length, fractions, seed)
    assert sorted(one for part in parts for one in part) == list(range(length))
    assert all(abs(len(part) - size) <= 1 for part, size in zip(parts, sizes, strict=True))


def split_on(rank: int) -> list[list[int]]:
    torch.manual_seed(rank)  # what happened before on a rank must not matter
    torch.rand(rank)
    return seeded_split(12, [0.75, 0.25], seed=4)


def test_a_split_is_the_same_on_every_rank_and_pinned() -> None:
    """On another machine or after an update, another split would put training samples into the validation."""
    expected = [[3, 1, 5, 4, 7, 10, 0, 6, 2], [9, 8, 11]]
    assert run_ranks(split_on, 2, init=False) == [expected, expected]
    train, val = seeded_split(Noisy(), [0.8, 0.2], 4)
    assert isinstance(train, Subset)
    assert (len(train), len(val)) == (8, 2)
    assert seeded_split(12, [0.75, 0.25], seed=5) != expected


@pytest.mark.parametrize("fractions", [[0.5, 0.4], [1.5, -0.5], [0.5, 0.5, 0.0], [], [float("nan"), 1.0]])
def test_fractions_that_are_no_shares_are_refused(fractions: list[float]) -> None:
    with pytest.raises(ConfigError, match="sum to 1"):
        seeded_split(10, fractions, 0)


def weather(seed: int = 0) -> torch.Tensor:
    """(time, variable, latitude), one variable of pressures in Pa: mean 1e5, deviation 1e-3."""
    values = torch.randn(23, 3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values * torch.tensor([1.0, 1e-3, 50.0])[:, None] + torch.tensor([0.0, 1e5, -3.0])[:, None]


def statistics(rank: int) -> dict[str, Any]:
    mine = weather()[[slice(0, 15), slice(15, 23), slice(0, 0)][rank]]  # the last of three ranks has nothing
    chunks = [chunk for chunk in torch.tensor_split(mine, 4) if len(mine)]
    return {
        "features": global_mean_std(chunks, feature_dim=1),
        "all": global_mean_std(chunks, correction=1),
        "bytes": global_mean_std([(mine.abs() % 200).to(torch.uint8)]),
        "error": error_of(rank),
    }


def error_of(rank: int) -> str:
    """Features that differ between ranks fail on all of them, rather than hang the others."""
    with pytest.raises(ConfigError) as caught:
        global_mean_std([torch.ones(2, 3 + (rank == 1))], feature_dim=1)
    return caught.value.what


@pytest.mark.parametrize("world", [2, 3])
def test_statistics_equal_those_of_one_process(world: int) -> None:
    """Also where a sum of squares would have lost all digits, and with a rank that has no data."""
    data = weather()  # mean / deviation is 1e8: of 16 digits, either way keeps 8
    for got in run_ranks(statistics, world):
        mean, std = got["features"]
        torch.testing.assert_close(mean, data.mean((0, 2)), rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(std, data.std((0, 2), correction=0), rtol=1e-7, atol=0)
        torch.testing.assert_close(got["all"], (data.mean(), data.std()), rtol=1e-13, atol=0)
        small = (data.abs() % 200).to(torch.uint8).double()
        torch.testing.assert_close(got["bytes"], (small.mean(), small.std(correction=0)), rtol=1e-13, atol=0)
        assert got["error"] == "tensors with 3 and with 4 features"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=6), max_size=6))
def test_chunks_do_not_matter(chunks: list[list[float]]) -> None:
    """In one process, against NumPy on all values."""
    values = np.array([one for chunk in chunks for one in chunk])
    tensors = [torch.tensor(chunk, dtype=torch.float64) for chunk in chunks]
    if not values.size:
        with pytest.raises(ConfigError, match="no values on any rank"):
            global_mean_std(tensors)
        return
    mean, std = global_mean_std(tensors)
    scale = float(np.abs(values).max())
    assert math.isclose(mean.item(), values.mean(), rel_tol=1e-12, abs_tol=1e-13 * scale)
    assert math.isclose(std.item(), values.std(), rel_tol=1e-9, abs_tol=1e-13 * scale)


def test_chunks_with_other_features_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensors with 3 and with 2 features"):
        global_mean_std([torch.ones(2, 3), torch.ones(3, 2)], feature_dim=1)
