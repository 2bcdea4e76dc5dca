"""By which norm a layout clips its gradients, and what of it each rank holds."""

from __future__ import annotations

import math
from typing import Any, Final

import lightning.pytorch as L
from torch import Tensor
from torch.optim import Optimizer

from fairlead_distributed._sharded import is_dtensor
from fairlead_distributed.objects import gather_objects
from fairlead_lightning.verify.numbers import wide

_SMALL: Final = 1e-3
"""The limit, as a multiple of the right norm: below what a part of the model has, which is clipped all the same."""


def measured(trainer: L.Trainer, optimizer: Any, whole: dict[str, Tensor]) -> dict[str, Any]:
    """The norm, found by clipping to much less than it should be, and undone; a collective of all ranks.

    Returns:
        `clipped_by`, and `squares`: the sum of squares that this rank holds, by the dimensions of the mesh that it is
        cut over. Nothing where it cannot be seen so.
    """
    if hasattr(trainer.strategy, "clipping_norm"):  # it clips within its step
        return {}
    if not isinstance(optimizer, Optimizer) or not _clips_by_norm(trainer):
        return {}
    squares = sum(float(wide(grad).square().sum()) for grad in whole.values())
    limit = _SMALL * math.sqrt(gather_objects(squares)[0])  # the same on all ranks, as a limit is
    if limit == 0:
        return {}
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    local = [_local(one) for one in gradients]
    before = [one.clone() for one in local]
    # A strategy may clip all that the module has, also what no optimizer gets.
    known = set(map(id, gradients))
    rest = [p.grad for p in trainer.lightning_module.parameters() if p.grad is not None and id(p.grad) not in known]
    beside = [(_local(one), _local(one).clone()) for one in rest]
    held: dict[tuple[str, ...], float] = {}
    for gradient, one in zip(gradients, before, strict=True):
        cut = _cut_over(gradient)
        held[cut] = held.get(cut, 0.0) + float(wide(one).square().sum())
    # Also on a rank without gradients, such as a stage that none reach: the others would wait for it.
    trainer.precision_plugin.clip_gradients(optimizer, limit)
    for one, was in beside:
        one.copy_(was)
    own = sum(held.values())
    if own == 0:
        return {"squares": held}
    kept = sum(float((wide(one) * wide(was)).sum()) for one, was in zip(local, before, strict=True)) / own
    for one, was in zip(local, before, strict=True):
        one.copy_(was)
    return {"squares": held, "clipped_by": limit / kept if kept else math.inf}


def told(trainer: L.Trainer) -> dict[str, Any]:
    """`clipped_by`, of a strategy that clips within its step, and says afterwards by which norm."""
    known: Any = getattr(trainer.strategy, "clipping_norm", None)
    norm = known() if known is not None and _clips_by_norm(trainer) else None
    return {"clipped_by": float(norm)} if norm is not None else {}


def _clips_by_norm(trainer: L.Trainer) -> bool:
    algorithm = str(trainer.gradient_clip_algorithm or "norm").rpartition(".")[2].lower()
    return bool(trainer.gradient_clip_val) and len(trainer.optimizers) == 1 and algorithm == "norm"


def _cut_over(tensor: Tensor) -> tuple[str, ...]:
    """The dimensions of the mesh whose ranks have a part of it each."""
    if not is_dtensor(tensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()
    return tuple(name for name, how in zip(names, tensor.placements, strict=True) if not how.is_replicate())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor
