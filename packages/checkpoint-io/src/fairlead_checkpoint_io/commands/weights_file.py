"""Weights as a file of safetensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model

from fairlead.errors import CheckpointError

__all__ = ["write_weights"]


class _Weights(torch.nn.Module):
    """Hands weights to `save_model`, which treats tied ones as a module's: one is kept, the others are noted."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._given = dict(weights)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return dict(self._given)


def write_weights(weights: Mapping[str, Any], path: Path, described: Mapping[str, Any]) -> list[str]:
    """Writes a new file.

    Args:
        weights: A model's `state_dict`.
        path: The file.
        described: What it is of; a safetensors file holds texts besides tensors, so that they become such.

    Returns:
        The entries that are no tensors (a module's extra state), which the format cannot hold.

    Raises:
        CheckpointError: There are no tensors, or some that share memory without being the same.
    """
    tensors = dict(_alone((str(name), v) for name, v in weights.items() if isinstance(v, torch.Tensor)))
    if not tensors:
        raise CheckpointError("there are no tensors to write", where=str(path))
    said = {str(key): str(value) for key, value in described.items() if value is not None and str(key) not in tensors}
    try:
        save_model(_Weights(tensors), str(path), metadata={"format": "pt", **said})
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            "safetensors cannot hold these weights",
            where=str(path),
            why=next(iter(str(error).strip().splitlines()), type(error).__name__),
            fix="`--to torch --weights` keeps them as they are",
        ) from error
    return [str(name) for name in weights if str(name) not in tensors]


def _alone(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Takes parts of larger buffers out of them (DeepSpeed's are such); what was one tensor stays one."""
    taken: dict[tuple[Any, ...], torch.Tensor] = {}
    for name, value in weights:
        whole = value.untyped_storage()
        if whole.nbytes() == value.nbytes:
            yield name, value
            continue
        key = (whole.data_ptr(), value.storage_offset(), value.shape, value.stride())
        yield name, taken.setdefault(key, value.clone())
