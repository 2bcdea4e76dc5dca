from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch

from fairlead.errors import CheckpointError
from fairlead_distributed import isolated_rng, rng_state, set_rng_state


def draws() -> list[object]:
    return [
        random.random(),
        random.gauss(0, 1),  # an odd number of these keeps a spare value in the state
        np.random.rand(3).tolist(),
        np.random.randn(1).tolist(),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
    ]


def test_draws_are_equal_after_a_restore_from_a_file() -> None:
    """Through torch.save and weights_only=True, which runs no code."""
    draws()
    file = io.BytesIO()
    torch.save(rng_state(), file)
    first = [draws() for _ in range(3)]
    file.seek(0)
    set_rng_state(torch.load(file, weights_only=True))
    assert [draws() for _ in range(3)] == first


def test_isolated_rng() -> None:
    state = rng_state()
    expected = draws()
    set_rng_state(state)
    with isolated_rng(seed=7):
        inside = draws()
    assert draws() == expected
    with isolated_rng(7):
        assert draws() == inside
    set_rng_state(state)
    with pytest.raises(ZeroDivisionError), isolated_rng():
        _ = len(draws()) / 0
    assert draws() == expected


@pytest.mark.parametrize("damage", ["python", "numpy", "torch"])
def test_a_damaged_state_changes_nothing(damage: str) -> None:
    state = rng_state()
    expected = draws()
    set_rng_state(state)
    random.random(), np.random.rand(), torch.rand(1)
    now = rng_state()
    after = draws()
    set_rng_state(now)
    with pytest.raises(CheckpointError, match="damaged"):
        set_rng_state({**state, damage: torch.zeros(3, dtype=torch.uint8) if damage == "torch" else (1, 2)})
    assert draws() == after
    with pytest.raises(CheckpointError, match="not a state"):
        set_rng_state({"torch": state["torch"]})
    set_rng_state(state)
    assert draws() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_are_equal_after_a_restore() -> None:
    state = rng_state()
    first = [torch.rand(3, device=f"cuda:{i}").tolist() for i in range(torch.cuda.device_count())]
    set_rng_state(state)
    assert [torch.rand(3, device=f"cuda:{i}").tolist() for i in range(torch.cuda.device_count())] == first
