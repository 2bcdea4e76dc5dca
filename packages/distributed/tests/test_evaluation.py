from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from fairlead.errors import ConfigError
from fairlead_distributed import EvaluationSampler, ReduceOp, SampleWeightedMean, all_reduce, weighted_mean
from fairlead_distributed.testing import run_ranks

LENGTH, BATCH = 11, 2


@settings(max_examples=150, deadline=None)
@given(length=st.integers(0, 40), world=st.integers(1, 7), batch=st.integers(1, 6))
def test_batch_counts_are_equal_and_every_sample_counts_once(length: int, world: int, batch: int) -> None:
    """The samples of weight 1 are the dataset, in order; the ranks have the same number of batches."""
    ranks = [EvaluationSampler(length, num_replicas=world, rank=rank) for rank in range(world)]
    assert len({len(DataLoader(range(length), batch, sampler=rank)) for rank in ranks}) == 1  # type: ignore[arg-type]
    weighted = []
    for rank in ranks:
        indices, weights = list(rank), rank.weights().tolist()
        assert len(indices) == len(weights) == len(rank)
        assert [rank.is_padding(i) for i in range(len(rank))] == [weight == 0 for weight in weights]
        assert sum(weight == 0 for weight in weights) <= 1
        batches = [rank.batch_weights(i, batch).tolist() for i in range(math.ceil(len(rank) / batch))]
        assert [weight for one in batches for weight in one] == weights
        weighted.append(list(zip(indices, weights, strict=True)))
    rows = [one for row in zip(*weighted, strict=True) for one in row]
    assert [index for index, weight in rows if weight] == list(range(length))
    assert all(0 <= index < length for index, _ in rows)


def per_sample(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss and a hit for each sample, of very different sizes."""
    return (indices + 1).double().log() * 10.0 ** (indices % 5), (indices % 3 == 0).float()


def evaluate(rank: int) -> dict[str, Any]:
    sampler = EvaluationSampler(LENGTH)
    loss, accuracy, batch_means = SampleWeightedMean(), SampleWeightedMean(), SampleWeightedMean()
    naive = []
    for number, batch in enumerate(DataLoader(range(LENGTH), batch_size=BATCH, sampler=sampler)):  # type: ignore[arg-type]
        # Equal counts: a collective in each step, as in a sharded model's forward pass, does not hang.
        all_reduce(torch.zeros(1))
        weights = sampler.batch_weights(number, BATCH)
        losses, hits = per_sample(batch)
        losses[weights == 0] = float("nan")  # whatever a model makes of padding
        loss.update(losses, weights)
        accuracy.update(hits, weights)
        if weights.sum():
            batch_means.update(hits[weights > 0].mean(), weights.sum())
        naive.append(hits.mean())
    got: dict[str, Any] = {"loss": loss.compute(), "accuracy": accuracy.compute(), "batch_means": batch_means.compute()}
    got["again"] = accuracy.compute()
    got["naive"] = all_reduce(torch.stack(naive).mean(), ReduceOp.AVERAGE).item()
    accuracy.reset()
    got["empty"] = accuracy.compute()
    # Only rank 0 has samples, and one value per class.
    sums = weighted_mean(torch.tensor([2.0, 6.0]) * (rank == 0), 4 if rank == 0 else 0)
    got["classes"] = sums.tolist()
    return got


@pytest.mark.parametrize("world", [2, 3])
def test_metrics_equal_those_of_one_process(world: int) -> None:
    """11 samples on 2 and 3 ranks, in batches of 2: uneven in every way."""
    losses, hits = per_sample(torch.arange(LENGTH))
    ranks = run_ranks(evaluate, world)
    for got in ranks:
        assert got["accuracy"] == got["again"] == hits.double().mean().item()
        assert got["loss"] == pytest.approx(losses.mean().item(), rel=1e-14)
        assert got["batch_means"] == pytest.approx(hits.double().mean().item(), rel=1e-7)
        assert got["naive"] != pytest.approx(hits.mean().item(), rel=1e-3)  # what this is for
        assert math.isnan(got["empty"])
        assert got["classes"] == [0.5, 1.5]
        assert got["loss"] == ranks[0]["loss"]


def test_one_process_needs_no_group() -> None:
    mean = SampleWeightedMean()
    mean.update(2.0)
    mean.update(5.0, 2)
    assert mean.compute() == 4.0
    assert isinstance(EvaluationSampler(3), DistributedSampler)  # another class would be wrapped by Lightning
    assert list(EvaluationSampler([7, 8, 9])) == [0, 1, 2]


def test_wrong_calls_are_refused() -> None:
    mean = SampleWeightedMean()
    with pytest.raises(ConfigError, match=r"shape \(3,\) with weights of shape \(2,\)"):
        mean.update(torch.ones(3), torch.ones(2))
    with pytest.raises(ConfigError, match=r"shape \(\) with weights of shape \(2,\)"):
        mean.update(1.0, torch.ones(2))
    for position in (-1, 2):
        with pytest.raises(ConfigError, match="this rank has 2 samples"):
            EvaluationSampler(3, num_replicas=2, rank=0).is_padding(position)
