"""Modules as people write them: their schedules, their own loops, and what they keep in attributes."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn

from integration_tests.exact.jobs.data import CLASSES

__all__ = ["Ema", "Manual", "Seldom", "Uncounted", "Unfreezing", "Written"]


class Written(L.LightningModule):
    """A classifier with dropout.

    Args:
        schedule: Of the learning rate: `none`, `one_cycle` and `warmup` ask for `trainer.estimated_stepping_batches`,
            `plateau` looks at the epoch's mean, `cosine` steps with the epochs.
        keeps: What it keeps in attributes, and computes with: see `_kept`.
        part: What is done with its first layers: `plain`, `compiled` before the training, or `unfrozen` in a hook from
            the second epoch on.
    """

    def __init__(self, schedule: str = "none", keeps: str = "nothing", part: str = "plain") -> None:
        super().__init__()
        self.schedule = schedule
        self.part = part
        self.keeps = keeps
        self.lr = 0.02
        self.net = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES)
        )
        if part == "compiled":
            self.net[0] = torch.compile(self.net[0], backend="eager")  # type: ignore[assignment]
        if part == "unfrozen":
            self.net[:2].requires_grad_(False)
        self.seen = 0
        self.stats: dict[str, list[float]] = {"loss": []}
        self.mean: float | None = None
        self.hidden: Tensor | None = None
        self.outputs: list[Tensor] = []
        self.replay: deque[Tensor] = deque(maxlen=3)
        if keeps == "generators":
            self.own_random = random.Random(5)
            self.generator = torch.Generator().manual_seed(5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = _first(batch)
        logits = self.net(x)
        loss = F.cross_entropy(logits, y) * self._kept(x, logits)
        self.log("train/loss", loss, on_step=True, on_epoch=True, batch_size=len(y))
        return loss

    def _kept(self, x: Tensor, logits: Tensor) -> Tensor:
        """A factor of about one that depends on what was kept so far."""
        one = torch.ones(())
        if self.keeps == "counter":
            self.seen += 1
            return one + 0.01 * (self.seen % 7)
        if self.keeps == "running mean":
            now = float(logits.detach().abs().mean())
            self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
            return one + 0.1 * self.mean
        if self.keeps == "list in a dict":
            self.stats["loss"].append(float(logits.detach().mean()))
            return one + 0.1 * sum(self.stats["loss"][-5:])
        if self.keeps == "hidden state":
            factor = one if self.hidden is None else one + 0.1 * self.hidden.mean()
            self.hidden = logits.detach().mean(0)
            return factor
        if self.keeps == "outputs":
            self.outputs.append(logits.detach().mean())
            return one + 0.1 * torch.stack(self.outputs).mean()
        if self.keeps == "replay":
            self.replay.append(x.detach().mean())
            return one + 0.1 * torch.stack(list(self.replay)).sum()
        if self.keeps == "generators":
            return one + 0.1 * self.own_random.random() + 0.1 * torch.rand((), generator=self.generator)
        return one

    def on_train_epoch_start(self) -> None:
        if self.part == "unfrozen" and self.current_epoch == 1:
            self.net[:2].requires_grad_(True)
        dataset = getattr(self.trainer.train_dataloader, "dataset", None)
        if dataset is not None and hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self.current_epoch)

    def on_train_epoch_end(self) -> None:
        if self.outputs:
            self.log("train/outputs", torch.stack(self.outputs).sum())
            self.outputs.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val/loss", F.cross_entropy(self.net(x), y), batch_size=len(y))

    def configure_optimizers(self) -> Any:
        trained = [one for one in self.parameters() if one.requires_grad or self.part == "unfrozen"]
        optimizer = torch.optim.AdamW(trained, lr=self.lr)
        if self.schedule == "none":
            return optimizer
        if self.schedule == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train/loss_epoch"}}
        schedulers = torch.optim.lr_scheduler
        if self.schedule == "cosine":
            return {"optimizer": optimizer, "lr_scheduler": schedulers.CosineAnnealingLR(optimizer, 3)}
        total = int(self.trainer.estimated_stepping_batches)
        made: Any
        if self.schedule == "one_cycle":
            made = schedulers.OneCycleLR(optimizer, max_lr=0.05, total_steps=total)
        else:
            made = schedulers.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * (1 - step / (total + 1)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, "interval": "step"}}


class Manual(Written):
    """It steps its optimizer itself, after every second batch: with accumulation."""

    counted = True
    every = 2

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / self.every)
        optimizer: Any = self.optimizers(use_pl_optimizer=self.counted)
        if self._number(batch_idx) % self.every == self.every - 1:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def _number(self, batch_idx: int) -> int:
        return batch_idx


class Uncounted(Manual):
    """It steps past Lightning's wrapper: `global_step` stays 0 there."""

    counted = False


class Seldom(Manual):
    """It steps after every fifth batch of the training, also within an epoch: gradients outlive its end."""

    every = 5

    def _number(self, batch_idx: int) -> int:
        return self.trainer.fit_loop.total_batch_idx


class Ema(L.Callback):
    """Averaged weights, kept in an attribute and given to the model for its validation."""

    def __init__(self, decay: float = 0.8) -> None:
        self.decay = decay
        self.shadow: dict[str, Tensor] = {}
        self.kept: dict[str, Tensor] = {}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for name, value in pl_module.named_parameters():
            old = self.shadow.get(name, value.detach())
            self.shadow[name] = self.decay * old + (1 - self.decay) * value.detach()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.shadow:
            self.kept = {name: value.detach().clone() for name, value in pl_module.named_parameters()}
            for name, value in pl_module.named_parameters():
                value.data.copy_(self.shadow[name])

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, value in pl_module.named_parameters():
            if name in self.kept:
                value.data.copy_(self.kept[name])


class Unfreezing(BaseFinetuning):
    """The first layers are frozen, and trained from the second epoch on, as another group of the optimizer."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        net: Any = pl_module.net
        self.freeze(net[:2])

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        net: Any = pl_module.net
        if epoch == 1:
            self.unfreeze_and_add_param_group(net[:2], optimizer)


def _first(batch: Any) -> tuple[Tensor, Tensor]:
    """Of a CombinedLoader's batches the first that is there, moved by the others."""
    if not isinstance(batch, dict):
        x, y = batch
        return x, y
    (x, y), *others = [one for one in batch.values() if one is not None]
    return x + 0.1 * sum(other.mean() for other, _ in others), y
