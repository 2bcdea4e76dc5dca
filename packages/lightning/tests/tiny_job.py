"""A job small enough to train in milliseconds, and what the tests ask of a run directory."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fairlead import RunConfig, Trainer, TrainerConfig
from fairlead_runs import read_history
from fairlead_runs.commit import Checkpoint, list_checkpoints, read_latest

SAMPLES = 32
BATCH = 4


class Line(L.LightningModule):
    """Fits a plane; the same from every start, and with a rate that falls at the end of each epoch."""

    resume_attributes: Any = ()  # `seen` is of this process

    def __init__(self, lr: float = 0.05, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        generator = torch.Generator().manual_seed(1)
        self.net = torch.nn.Linear(width, 1)
        with torch.no_grad():
            self.net.weight.copy_(torch.randn(1, width, generator=generator))
            self.net.bias.zero_()
        self.seen: list[int] = []

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.seen.append(self.trainer.global_step)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val/loss", torch.nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("test/loss", torch.nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]


def samples(count: int = SAMPLES, width: int = 3) -> TensorDataset:
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(2))
    return TensorDataset(x, x.sum(1, keepdim=True))


def loader(batch_size: int = BATCH, width: int = 3) -> DataLoader[tuple[Tensor, ...]]:
    """The same batches in the same order at every start."""
    return DataLoader(samples(width=width), batch_size=batch_size)


class Data(L.LightningDataModule):
    """The same as a datamodule."""

    def __init__(self, batch_size: int = BATCH) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return loader(self.hparams["batch_size"])

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return loader(self.hparams["batch_size"])


def make_trainer(root: Path, run: dict[str, Any] | None = None, **config: Any) -> Trainer:
    """A quiet trainer on one CPU, with its run directory at `root / "run"`."""
    asked = {
        "accelerator": "cpu",
        "devices": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        **config,
    }
    return Trainer(
        TrainerConfig.model_validate(asked), run=RunConfig(**{"name": "run", "dir": str(root), **(run or {})})
    )


def fit(root: Path, run: dict[str, Any] | None = None, *, model: Line | None = None, **config: Any) -> Line:
    """Trains on the usual data; returns the model."""
    model = model if model is not None else Line()
    make_trainer(root, run, **config).fit(model, datamodule=Data())
    return model


def plain(**settings: Any) -> L.Trainer:
    """Lightning's own Trainer, quiet."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(**{**defaults, **settings})


def end_wandb(number: int) -> None:
    """Sends a signal to W&B's own process of this one."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"wandb-core") and str(os.getpid()).encode() in words:
            os.kill(int(folder.name), number)


def weights(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def apart(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """The largest difference of any weight."""
    return float((weights(one) - weights(other)).abs().max())


def events(run: Path, name: str | None = None) -> list[dict[str, Any]]:
    return [e for e in read_history(run / "history.jsonl") if name in (None, e["event"])]


def checkpoints(run: Path) -> list[Checkpoint]:
    return list_checkpoints(run / "checkpoints")


def latest(run: Path) -> Checkpoint:
    name = read_latest(run / "checkpoints")
    assert name is not None
    return Checkpoint.at(run / "checkpoints" / name)


def metric_rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, to see that nothing was written."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def manifest(checkpoint: Checkpoint) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint.path / "manifest.json").read_text())
    return found
