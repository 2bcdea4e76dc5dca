"""A convolution net with batch norm, and momentum."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from integration_tests.exact.jobs.data import CLASSES

__all__ = ["ConvNet"]


class ConvNet(L.LightningModule):
    """For images of one channel and 8 x 8 pixels.

    Args:
        channels: Of the first layer.
        each_batch: Whether a validation logs the loss of each of its batches as well.
    """

    def __init__(self, channels: int = 8, each_batch: bool = False) -> None:
        super().__init__()
        self.each_batch = each_batch
        self.layers = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.Dropout2d(0.1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * channels, CLASSES),
        )

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.layers(images), labels)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        images, labels = batch
        loss = F.cross_entropy(self.layers(images), labels)
        self.log("val/loss", loss, sync_dist=True, batch_size=len(labels))
        if self.each_batch:
            self.log("val/loss_of_batch", loss, on_step=True, on_epoch=False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]
