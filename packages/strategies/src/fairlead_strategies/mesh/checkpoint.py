"""Where the parts of a checkpoint are read into."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, zeros
from torch.nn import Module
from torch.optim import Optimizer

from fairlead_distributed.full_state import plain_state

Key = tuple[str | int, ...]
"""Where a tensor is in a checkpoint: the keys that lead to it."""


@contextmanager
def tuples_kept(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """What was a tuple in a group before a load in the block is one after it: torch makes lists of them on the way."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    names = [[name for name, value in group.items() if isinstance(value, tuple)] for group in groups]
    yield
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group, tuples in zip(groups, names, strict=True):
        group.update({name: tuple(group[name]) for name in tuples})


def destinations(
    model: Module, optimizers: Iterable[Optimizer]
) -> Callable[[Key, torch.Size, torch.dtype], torch.Tensor | None]:
    """Which tensor to read into, for a key in Lightning's checkpoint; see `ShardedLoads`.

    Weights are read where they are. The state of a parameter is laid out as the parameter is; what has another shape
    is held whole by each rank.
    """
    weights = plain_state(get_model_state_dict(model))
    parameters = {name: value for name, value in weights.items() if isinstance(value, DTensor)}
    count = sum(1 for _ in optimizers)

    def destination(key: Key, size: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        if key[0] in ("state_dict", "model"):
            own = weights.get(str(key[1]))
            fits = isinstance(own, torch.Tensor) and own.shape == size and own.dtype == dtype
            return own if fits else None
        known = len(key) == 4 and key[1] == "state" and key[0] in {f"optimizer_{i}" for i in range(count)}
        parameter = parameters.get(str(key[2])) if known else None
        if parameter is None or (not size and parameter.ndim):
            return None
        if parameter.shape == size:
            return torch.empty_like(parameter, dtype=dtype)
        mesh = parameter.device_mesh
        return zeros(*size, dtype=dtype, device_mesh=mesh, placements=[Replicate()] * mesh.ndim)

    return destination
