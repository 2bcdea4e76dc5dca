"""Generators apart from those that the model draws from."""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

import numpy as np
import torch


class IsolatedGenerators:
    """While it is entered, the global generators of the CPU are this object's.

    Args:
        seed: What they begin with.

    Example:
        >>> state = torch.get_rng_state()
        >>> with IsolatedGenerators(0):
        ...     drawn = torch.rand(2)
        >>> torch.equal(torch.get_rng_state(), state)
        True
    """

    def __init__(self, seed: int) -> None:
        self._theirs = _states()
        self._own: tuple[Any, ...] = (
            random.Random(seed).getstate(),
            np.random.RandomState(seed % 2**32).get_state(),
            torch.Generator().manual_seed(seed).get_state(),
        )

    def __enter__(self) -> None:
        self._theirs = _states()
        _set_states(self._own)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._own = _states()
        _set_states(self._theirs)


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_states(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
