"""Where the parts of a sharded checkpoint go: into the weights themselves, and into new state of the optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, zeros
from torch.nn import Module
from torch.optim import Optimizer

__all__ = ["places"]

Place = tuple[str | int, ...]


def places(
    model: Module, optimizers: Iterable[Optimizer]
) -> Callable[[Place, torch.Size, torch.dtype], torch.Tensor | None]:
    """The tensor to read into, for a place in Lightning's checkpoint; see `fairlead.interfaces.ShardedLoads`.

    Weights are read where they are. The state of a parameter is laid out as the parameter is; what has another shape
    is held whole by each rank.

    Args:
        model: The sharded model.
        optimizers: Its optimizers.
    """
    weights: dict[str, Any] = get_model_state_dict(model)
    parameters = {name: value for name, value in weights.items() if isinstance(value, DTensor)}
    count = sum(1 for _ in optimizers)

    def place(where: Place, size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        if where[0] in ("state_dict", "model"):
            own = weights.get(str(where[1]))
            fits = isinstance(own, torch.Tensor) and own.shape == size and own.dtype == dtype
            return own if fits else None
        known = len(where) == 4 and where[1] == "state" and where[0] in {f"optimizer_{i}" for i in range(count)}
        parameter = parameters.get(str(where[2])) if known else None
        if parameter is None or (not size and parameter.ndim):
            return None
        if parameter.shape == size:
            return torch.empty_like(parameter, dtype=dtype)
        mesh = parameter.device_mesh
        return zeros(*size, dtype=dtype, device_mesh=mesh, placements=[Replicate()] * mesh.ndim)

    return place
