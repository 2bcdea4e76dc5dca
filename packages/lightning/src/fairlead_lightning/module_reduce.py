"""`self.all_reduce(tensor, reduce_op="mean")` on a module, beside Lightning's `self.all_gather`."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from fairlead_distributed import all_reduce, is_initialized


def lend_all_reduce(module: L.LightningModule) -> None:
    """Gives the module of a fit or an evaluation the method `all_reduce`, until `take_all_reduce_back`.

    The module alone: its class, and Lightning's, stay as they are. One that has such a method keeps its own.
    """
    if not hasattr(module, "all_reduce"):
        vars(module)["all_reduce"] = partial(_reduced, module)


def take_all_reduce_back(module: L.LightningModule) -> None:
    """A module that is pickled or copied is as its user made it."""
    lent = vars(module).get("all_reduce")
    if isinstance(lent, partial) and lent.func is _reduced:
        del vars(module)["all_reduce"]


def _reduced(module: L.LightningModule, tensor: Tensor | float, reduce_op: Any = "mean") -> Tensor:
    """The element-wise mean (sum, min, max, product) of all ranks' tensors, as a new one without a gradient.

    A number is taken for a tensor of one; `reduce_op` is a name or a `ReduceOp`. All ranks call it.
    """
    value = tensor if isinstance(tensor, Tensor) else torch.tensor(float(tensor), device=module.device)
    trainer = module.trainer
    if trainer.world_size > 1 and is_initialized():
        return all_reduce(value, reduce_op)
    reduced = trainer.strategy.reduce(value.detach().clone(), reduce_op=reduce_op)  # one rank, or XLA's own
    assert isinstance(reduced, Tensor)
    return reduced
