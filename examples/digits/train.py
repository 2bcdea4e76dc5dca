"""Handwritten digits with a small convolutional net: an ordinary Lightning script with one line of Fairlead."""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning.pytorch as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from fairlead import Fairlead


class DigitNet(L.LightningModule):
    """Two convolutions and a linear layer on 8 x 8 grey images."""

    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the ten digits: (batch, 1, 8, 8) with values from 0 to 1 -> (batch, 10)."""
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The cross-entropy of one batch."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log loss and accuracy on the held-out images."""
        images, labels = batch
        logits = self(images)
        self.log("val/loss", F.cross_entropy(logits, labels), prog_bar=True, sync_dist=True)
        self.log("val/accuracy", (logits.argmax(1) == labels).float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW at a fixed rate: enough for so small a task."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def loaders() -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """Four fifths of the 1,797 images to train on, one fifth held out."""
    data = np.load(Path(__file__).with_name("digits.npz"))
    images = torch.as_tensor(data["images"], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    digits = TensorDataset(images, torch.as_tensor(data["labels"], dtype=torch.int64))
    train, val = random_split(digits, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=256)


def main() -> None:
    """Train, then say how many of the held-out digits are read rightly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accelerator", default="cpu")
    options = parser.parse_args()

    L.seed_everything(0)
    train, val = loaders()
    trainer = L.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        max_epochs=options.epochs,
        log_every_n_steps=10,
        callbacks=[Fairlead(run="runs/digits")],
    )
    trainer.fit(DigitNet(), train, val)
    if trainer.is_global_zero:
        print(f"held-out accuracy: {trainer.callback_metrics['val/accuracy']:.1%}")


if __name__ == "__main__":
    main()
