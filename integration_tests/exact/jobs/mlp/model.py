"""A multi-layer perceptron with dropout, AdamW, and a schedule that steps with the optimizer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from integration_tests.exact.jobs.data import CLASSES, note

__all__ = ["MLP"]


class MLP(L.LightningModule):
    """Its layers are registered in another order than they are used.

    DDP groups gradients by the order of registration until it has seen in which order they come: with this model that
    makes a difference.

    Args:
        width: Of the hidden layers.
        dropout: The probability.
        record: A file to which each step adds the batch's sum, to tell which samples were seen.
    """

    def __init__(self, width: int = 48, dropout: float = 0.3, record: str | None = None) -> None:
        super().__init__()
        self.last = nn.Linear(width, CLASSES)
        self.first = nn.Linear(8, width)
        self.middle = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.dropout = dropout
        self.record = record

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        for layer in reversed(self.middle):
            y = F.dropout(F.relu(layer(y)), self.dropout, self.training)
        logits: Tensor = self.last(y)
        return logits

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        points, labels = batch
        loss = F.cross_entropy(self(points), labels)
        self.log("train/loss", loss)
        if self.record is not None:
            rows = points.double().sum(dim=1).tolist()
            note(f"{self.record}-{self.global_rank}", epoch=self.current_epoch, batch=index, points=rows)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        points, labels = batch
        loss = F.cross_entropy(self(points), labels)
        self.log("val/loss", loss, sync_dist=True, batch_size=len(labels))
        if self.record is not None:
            note(f"{self.record}-val-{self.global_rank}", batch=index, size=len(labels))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
