"""The state of every random generator that a training loop draws from, as plain data and tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fairlead.errors import CheckpointError

_KEYS = frozenset({"python", "numpy", "torch", "cuda", "mps"})


def rng_state() -> dict[str, Any]:
    """The states of Python's `random`, NumPy's global generator, torch on the CPU, and on every CUDA device or MPS.

    Only tuples, numbers, strings and tensors: `torch.load(..., weights_only=True)` reads it. Generators that the
    user made (`np.random.default_rng()`, `torch.Generator()`) are not global and not in it.

    Example:
        >>> state = rng_state()
        >>> first = torch.rand(3)
        >>> set_rng_state(state)
        >>> torch.equal(torch.rand(3), first)
        True
    """
    return {
        "python": random.getstate(),
        "numpy": _encode(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else [],
        "mps": torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restores what `rng_state` returned; the next draws are the same as after it.

    Devices that are not there now are skipped, and devices that the state does not speak of are left alone: a run
    may move to a machine with another number of GPUs.

    Raises:
        CheckpointError: `state` does not come from `rng_state`, or is damaged. Nothing was changed.
    """
    if not isinstance(state, Mapping) or set(state) != _KEYS:
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise CheckpointError(
            "this is not a state of the random generators", why=f"expected {sorted(_KEYS)}, found {found}"
        )
    before = rng_state()
    try:
        _restore(state)
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError, AttributeError) as error:
        _restore(before)
        raise CheckpointError(
            "the state of the random generators is damaged", why=f"{type(error).__name__}: {error}"
        ) from error


def _restore(state: Mapping[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(_decode(state["numpy"]))
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available():
        for device, device_state in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(device_state.cpu(), device)
    if state["mps"] is not None and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"].cpu())


@contextmanager
def isolated_rng(seed: int | None = None) -> Iterator[None]:
    """Draws inside the block do not change the draws after it.

    Args:
        seed: Seeds all generators for the block; None lets it go on from where they stand.

    Example:
        >>> with isolated_rng(seed=0):
        ...     preview = torch.randn(2)
    """
    state = rng_state()
    try:
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)  # all devices
        yield
    finally:
        set_rng_state(state)


def _encode(value: Any) -> Any:
    # NumPy arrays do not pass `weights_only=True`; torch has no arithmetic on uint32, but int64 holds it.
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "array": torch.from_numpy(value.astype(np.int64))}
    if isinstance(value, np.generic):
        return value.item()
    return {key: _encode(item) for key, item in value.items()} if isinstance(value, dict) else value


def _decode(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"dtype", "array"}:
        return value["array"].cpu().numpy().astype(value["dtype"])
    return {key: _decode(item) for key, item in value.items()} if isinstance(value, dict) else value
