"""ZeRO's vectors of one number of ranks, made of those of another; without processes."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from fairlead_strategies.deepspeed.rank_state import Move, Slot, each_by_itself, end_to_end

SIZES = [{"a": 17, "b": 1, "c": 30}, {"d": 2, "e": 12}]
WHOLE = {name: torch.arange(1.0, n + 1) + 100 * i for group in SIZES for i, (name, n) in enumerate(group.items())}
RANKS = (1, 2, 3, 4, 7)


def flat(ranks: int, gap: int = 0) -> list[list[Tensor]]:
    """By rank, as stages 1 and 2 cut it: the parameters end to end, then equal parts of an even size."""
    groups = [torch.cat([torch.cat([WHOLE[name], torch.zeros(gap)]) for name in group]) for group in SIZES]
    parts = [torch.cat([g, torch.zeros(-len(g) % (2 * ranks))]).chunk(ranks) for g in groups]
    return [[part[rank] for part in parts] for rank in range(ranks)]


def split(ranks: int) -> list[list[Tensor]]:
    """By rank, as stage 3 cuts it: each parameter by itself."""
    found: list[list[Tensor]] = []
    for rank in range(ranks):
        parts = [
            [torch.cat([WHOLE[n], torch.zeros(-len(WHOLE[n]) % ranks)]).chunk(ranks)[rank] for n in g] for g in SIZES
        ]
        found.append([torch.cat(part) for part in parts])
    return found


def cut(stage: int, ranks: int, gap: int) -> tuple[list[list[Tensor]], dict[str, Slot]]:
    if stage == 3:
        return split(ranks), each_by_itself(SIZES, ranks)
    vectors = flat(ranks, gap)
    return vectors, end_to_end(SIZES, [[gap] * len(group) for group in SIZES], [len(v) for v in vectors[0]])


@pytest.mark.parametrize("stage", [2, 3])
def test_any_number_of_ranks_is_made_of_any_other(stage: int) -> None:
    """Also where a rank has nothing of a parameter, and where the gaps between parameters are others."""
    for before, now in product(RANKS, RANKS):
        (old, was), (new, goes) = cut(stage, before, 0), cut(stage, now, 3)
        for rank, vector in product(range(now), range(len(SIZES))):
            move = Move(rank, len(new[rank][vector]), [(was[name], goes[name]) for name in SIZES[vector]])
            assert torch.equal(move.of(lambda r, v, old=old: old[r][v]), new[rank][vector])  # type: ignore[misc]


def test_a_rank_reads_only_the_ranks_that_have_its_part() -> None:
    """Besides the first, whose file says what there is."""
    was, goes = each_by_itself([{"a": 1000}], 100), each_by_itself([{"a": 1000}], 50)
    move = Move(20, 20, [(was["a"], goes["a"])])
    assert move.sources() == [(0, 0), (40, 0), (41, 0)]
