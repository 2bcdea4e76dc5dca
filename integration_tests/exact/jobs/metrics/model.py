"""Everything that hangs on what was logged: epoch means, a torchmetrics metric, a plateau schedule, early stopping."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.aggregation import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from integration_tests.exact.jobs.data import CLASSES

__all__ = ["Measured"]


class Measured(L.LightningModule):
    """A linear model whose learning rate, length and best checkpoint are decided by what it logs.

    Args:
        dropout: On the inputs.
        lr: High enough that the validation loss gets worse some time.
        by: The metric that the plateau schedule looks at.
    """

    def __init__(self, dropout: float = 0.2, lr: float = 0.1, by: str = "val/loss") -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)
        self.dropout, self.lr, self.by = dropout, lr, by
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.val_accuracy = MulticlassAccuracy(CLASSES)
        self.size = MeanMetric()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        points, labels = batch
        logits = self.layer(F.dropout(points, self.dropout, self.training))
        loss = F.cross_entropy(logits, labels)
        self.log("train/loss", loss, on_step=True, on_epoch=True, batch_size=len(labels))
        self.log("train/worst", loss.detach(), on_step=False, on_epoch=True, reduce_fx="max", batch_size=len(labels))
        self.accuracy(logits, labels)
        self.log("train/accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.size(points.square().mean())
        self.log("train/size", self.size, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        points, labels = batch
        logits = self.layer(points)
        self.log("val/loss", F.cross_entropy(logits, labels), sync_dist=True, batch_size=len(labels))
        self.val_accuracy(logits, labels)
        self.log("val/accuracy", self.val_accuracy)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": self.by}}
