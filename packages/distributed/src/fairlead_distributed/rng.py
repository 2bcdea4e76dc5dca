"""The state of every random generator that a training loop draws from, as plain data and tensors."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fairlead.errors import CheckpointError
from fairlead_distributed.plain_data import from_plain, to_plain

_KEYS = frozenset({"python", "numpy", "torch", "cuda", "mps"})
_XLA = "xla"


def rng_state() -> dict[str, Any]:
    """The states of Python's `random`, NumPy's global generator, torch on the CPU, and on every CUDA device or MPS.

    Where this process computes on an XLA device, that device's as well, under `xla`. Only tuples, numbers, strings and
    tensors: `torch.load(..., weights_only=True)` reads it. Generators that the user made (`np.random.default_rng()`,
    `torch.Generator()`) are not global and not in it.
    """
    return {
        "python": random.getstate(),
        "numpy": to_plain(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else [],
        "mps": torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
        **({_XLA: xla.get_rng_state()} if (xla := _xla_model()) is not None else {}),
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restores what `rng_state` returned; the next draws are the same as after it.

    A run may move to a machine with another number of GPUs: devices that only one of them has are left alone.

    Raises:
        CheckpointError: `state` does not come from `rng_state`, or is damaged. Nothing was changed.
    """
    if not isinstance(state, Mapping) or set(state) - {_XLA} != _KEYS:
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
    np.random.set_state(from_plain(state["numpy"]))
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available():
        for device, device_state in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(device_state.cpu(), device)
    if state["mps"] is not None and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"].cpu())
    if _XLA in state and (xla := _xla_model()) is not None:
        xla.set_rng_state(int(state[_XLA]))


def _xla_model() -> Any | None:
    """`torch_xla.core.xla_model`, if this process computes on an XLA device.

    Lightning imports torch_xla wherever it is installed; to ask it for a state would take the TPU.
    """
    loaded = sys.modules.get("torch_xla")
    if loaded is None or not loaded._XLAC._xla_runtime_is_initialized():
        return None
    return sys.modules.get("torch_xla.core.xla_model")


def seed_xla(seed: int) -> None:
    """Seeds the XLA device, if this process computes on one: `torch.manual_seed` leaves it as it is."""
    xla = _xla_model()
    if xla is not None:
        xla.set_rng_state(seed % 2**63)


@contextmanager
def isolated_rng(seed: int | None = None) -> Iterator[None]:
    """Draws inside the block do not change the draws after it; `seed` seeds all generators for the block.

    Quicker than `torch.manual_seed` and `rng_state`: a step may be in one.

    Example:
        >>> with isolated_rng(seed=0):
        ...     preview = torch.randn(2)
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    cpu = cpu_states()
    on_cuda = torch.cuda.get_rng_state_all() if cuda else []
    on_mps = torch.mps.get_rng_state() if mps else None
    xla = _xla_model()
    on_xla = xla.get_rng_state() if xla is not None else None
    try:
        if seed is not None:
            seed_cpu(seed)
            if cuda:
                torch.cuda.manual_seed_all(seed)
            if mps:
                torch.mps.manual_seed(seed)
            seed_xla(seed)
        yield
    finally:
        set_cpu_states(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(on_cuda)
        if on_mps is not None:
            torch.mps.set_rng_state(on_mps)
        if xla is not None:
            xla.set_rng_state(on_xla)


class IsolatedGenerators:
    """While it is entered, the global generators of the CPU are this object's, which began with a seed."""

    def __init__(self, seed: int) -> None:
        self._theirs = cpu_states()
        seed_cpu(seed)
        self._own = cpu_states()
        set_cpu_states(self._theirs)

    def __enter__(self) -> None:
        self._theirs = cpu_states()
        set_cpu_states(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = cpu_states()
        set_cpu_states(self._theirs)


def seed_cpu(seed: int) -> None:
    """Seeds the global generators of the CPU; a forked worker must not touch the GPU, as `torch.manual_seed` does."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def cpu_states() -> tuple[Any, ...]:
    """The states of the global generators of the CPU, as the libraries have them: quicker than `rng_state`."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def seeded_states(seed: int) -> tuple[Any, ...]:
    """The states that a seed gives; those that there are stay."""
    with isolated_rng(seed):
        return cpu_states()


def set_cpu_states(states: tuple[Any, ...]) -> None:
    """Puts back what `cpu_states` gave."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
