"""Learning rates that are made of the number of ranks, as the linear scaling rule has it: right, and other ones.

They are told from those of a schedule that is stepped too often by a test: `configure_optimizers` in one process that
is told of the ranks gives the same, or all steps have one factor, which is that of a rule.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final
from unittest.mock import patch

import lightning.pytorch as L
import torch.distributed as dist

from fairlead_lightning.verify.notes import Notes
from fairlead_lightning.verify.numbers import Rates

_CLOSE: Final = 1e-6


def comparable(notes: Notes, alone: Rates) -> Rates | None:
    """The rates of all ranks, where they are the same and belong to the same groups as in one process."""
    own: Rates = notes.said("rates")
    same = all(rank["rates"] == own for rank in notes.ranks)
    fits = len(own) == len(alone) and all(len(a) == len(b) for a, b in zip(own, alone, strict=True))
    return own if same and fits else None


def alike(one: Rates | None, other: Rates) -> bool:
    """Whether they are the same rates."""
    if one is None or len(one) != len(other):
        return False
    pairs = zip(one, other, strict=True)
    return all(len(a) == len(b) and all(map(_close, a, b)) for a, b in pairs)


def by_rule(own: Rates, alone: Rates, counts: Sequence[int]) -> bool:
    """Whether each group has one factor in all steps: 1, a number of ranks or its root, or one through it."""
    known = [factor for count in counts for factor in (count, math.sqrt(count), 1 / count, 1 / math.sqrt(count))]
    for pairs in zip(*(zip(a, b, strict=True) for a, b in zip(own, alone, strict=True)), strict=True):
        if not any(all(_close(a, b * factor) for a, b in pairs) for factor in (1.0, *known)):
            return False
    return True


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_CLOSE, abs_tol=0.0)


@contextmanager
def told_of(ranks: int) -> Iterator[None]:
    """Code inside that asks for the number of ranks is told this one, as rank 0."""
    with ExitStack() as stack:
        for name in ("world_size", "num_devices"):
            stack.enter_context(patch.object(L.Trainer, name, ranks))
        stack.enter_context(patch.object(dist, "is_initialized", lambda: True))
        stack.enter_context(patch.object(dist, "get_world_size", lambda group=None: ranks))
        stack.enter_context(patch.object(dist, "get_rank", lambda group=None: 0))
        stack.enter_context(patch.dict(os.environ, {"WORLD_SIZE": str(ranks), "RANK": "0"}))
        yield


def shown(rates: Rates) -> str:
    """Those of the first group of each step, or one where they are the same.

    Example:
        >>> shown([[0.1], [0.1]]), shown([[0.1], [0.2]])
        ('0.1', '0.1, 0.2')
    """
    first = [f"{one[0]:.4g}" for one in rates if one]
    return first[0] if len(set(first)) == 1 else ", ".join(first)
