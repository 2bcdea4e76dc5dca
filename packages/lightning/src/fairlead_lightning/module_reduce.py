"""`self.all_reduce(tensor, reduce_op="mean")` on a module, beside Lightning's `self.all_gather`."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from fairlead_distributed import all_reduce, is_initialized


class ModuleReduce(L.Callback):
    """Gives the module of a fit or an evaluation the method `all_reduce`, for as long as that lasts.

    The module alone: its class, and Lightning's, stay as they are. One that has such a method keeps its own.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """The trainer is known."""
        if not hasattr(pl_module, "all_reduce"):
            vars(pl_module)["all_reduce"] = partial(_reduced, pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Takes it away again: a module that is pickled or copied is as its user made it."""
        if _is_ours(vars(pl_module).get("all_reduce")):
            del vars(pl_module)["all_reduce"]

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """As `teardown`, which Lightning leaves out after an exception."""
        self.teardown(trainer, pl_module, "")


def _is_ours(value: object) -> bool:
    return isinstance(value, partial) and value.func is _reduced


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
