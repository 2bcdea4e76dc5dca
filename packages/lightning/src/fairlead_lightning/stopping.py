"""Stopping on SIGTERM: all ranks leave at the same optimizer step, where they can save together."""

from __future__ import annotations

from types import FrameType
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist

from fairlead_lightning import _lightning_compat as compat

__all__ = ["StopTogether"]


@compat.only_its_own_batch_hooks
class StopTogether(L.Callback):
    """Notes SIGTERM, and has the ranks agree on it after each optimizer step.

    Lightning's own handler starts a collective in the middle of whatever the rank is doing; where
    two ranks are not at the same operation, it meets another one, and the run hangs.

    Example:
        >>> stop = StopTogether()
        >>> stop.attach(L.Trainer(accelerator="cpu", logger=False))
        >>> stop.asked
        False
    """

    def __init__(self) -> None:
        self.asked = False
        self._trainer: L.Trainer | None = None

    def attach(self, trainer: L.Trainer) -> None:
        """Takes the place of Lightning's handler in this trainer."""
        self._trainer = trainer
        compat.replace_sigterm_handler(trainer, self._note)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Between two steps, never between the micro-batches of one."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches and not trainer.is_last_batch:
            return
        if self._asked_any(trainer):
            compat.stop_on_sigterm(trainer)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        self.asked = True
        # Nothing of an evaluation is saved: no rank needs to wait for another.
        if self._trainer is not None and self._trainer.state.fn != "fit":
            compat.stop_on_sigterm(self._trainer)

    def _asked_any(self, trainer: L.Trainer) -> bool:
        if trainer.world_size == 1 or not dist.is_initialized():
            return self.asked
        asked = torch.tensor([int(self.asked)], device=trainer.strategy.root_device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked.item())
