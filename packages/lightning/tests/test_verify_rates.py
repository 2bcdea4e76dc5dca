"""Learning rates that are made of the number of ranks, told from others."""

from __future__ import annotations

import os

import lightning.pytorch as L
import pytest
import torch.distributed as dist

from fairlead_lightning.verify.numbers import Rates
from fairlead_lightning.verify.reference import alike, by_rule, seeing_world_size, shown

ALONE: Rates = [[0.1, 0.2], [0.2, 0.2], [0.3, 0.2]]


@pytest.mark.parametrize(
    ("factors", "ruled"),
    [
        ((4.0, 4.0), True),  # the linear rule
        ((2.0, 2.0), True),  # the root
        ((0.25, 1.0), True),  # of one group alone
        ((1.0, 1.0), True),
        ((3.0, 3.0), False),  # of no number of ranks
        ((1.5, 1.0), False),
    ],
)
def test_one_factor_in_all_steps_is_a_rule(factors: tuple[float, float], ruled: bool) -> None:
    own = [[rate * factor for rate, factor in zip(step, factors, strict=True)] for step in ALONE]
    assert by_rule(own, ALONE, [4]) == ruled


def test_a_factor_that_changes_is_none() -> None:
    """As of a scheduler that is stepped twice."""
    assert not by_rule([[0.1, 0.2], [0.3, 0.2], [0.5, 0.2]], ALONE, [2])


def test_rates_are_alike_by_their_values() -> None:
    assert alike([list(step) for step in ALONE], ALONE)
    assert not alike([[0.1, 0.2]], ALONE)
    assert not alike([[0.1], [0.2], [0.3]], ALONE)
    assert not alike(None, ALONE)
    assert shown(ALONE) == "0.1, 0.2, 0.3"


def test_code_that_asks_for_the_ranks_is_told_so() -> None:
    """In each way in which people ask; behind it everything is as it was."""
    trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", devices=1)
    before = dict(os.environ)
    with seeing_world_size(4):
        assert trainer.world_size == trainer.num_devices == 4
        assert (dist.is_initialized(), dist.get_world_size(), dist.get_rank()) == (True, 4, 0)
        assert (os.environ["WORLD_SIZE"], os.environ["RANK"]) == ("4", "0")
    assert trainer.world_size == trainer.num_devices == 1
    assert not dist.is_initialized()
    assert dict(os.environ) == before
