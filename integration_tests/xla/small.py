"""A small job for XLA devices: what draws random numbers, keeps statistics and holds optimizer state is in it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from integration_tests.jobs import Call, fairlead

MODEL = '''
import os
import signal

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Data(L.LightningDataModule):
    def __init__(self, batch_size=8, samples=64):
        super().__init__()
        self.batch_size, self.samples = batch_size, samples

    def loader(self, seed, shuffle):
        x = torch.randn(self.samples, 16, generator=torch.Generator().manual_seed(seed))
        return DataLoader(TensorDataset(x, x[:, :4].sum(1, keepdim=True)), batch_size=self.batch_size, shuffle=shuffle)

    def train_dataloader(self):
        return self.loader(5, True)

    def val_dataloader(self):
        return self.loader(6, False)

    test_dataloader = predict_dataloader = val_dataloader


def stop_here(trainer):
    how, _, step = os.environ.get("STOP", "").partition(":")
    if how and trainer.global_step == int(step):
        os.kill(os.getpid(), getattr(signal, how))


class Net(L.LightningModule):
    def __init__(self, dropout=0.1, lr=0.01, norm="BatchNorm1d"):
        super().__init__()
        self.lr = lr
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 32),
            getattr(torch.nn, norm)(32),
            torch.nn.ReLU(),
            torch.nn.Dropout(dropout),
            torch.nn.Linear(32, 1),
        )

    def loss(self, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch, index):
        stop_here(self.trainer)
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val/loss", self.loss(batch))

    def test_step(self, batch, index):
        self.log("test/loss", self.loss(batch))

    def predict_step(self, batch, index):
        return self.net(batch[0])[:, 0]

    def on_train_end(self):
        if self.device.type == "xla":
            import torch_xla

            spec = torch_xla._XLAC._get_xla_sharding_spec
            moments = [state[name] for state in self.optimizers().state.values() for name in ("exp_avg", "exp_avg_sq")]
            split = [["devices=" in spec(tensor) for tensor in tensors] for tensors in (self.parameters(), moments)]
            print("SPLIT", *[sum(flags) for flags in split], "of", *[len(flags) for flags in split])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)]


class Manual(Net):
    """Steps its optimizer itself, every second batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        stop_here(self.trainer)
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.log("train/loss", loss)
        if index % 2:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
'''

SPLIT = "trainer.strategy.sharding_strategy=FULL_SHARD"
LAYOUTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "one device": (1, ()),
    "data parallel": (4, ()),
    "fully sharded": (4, (SPLIT,)),
}
"""The devices, and the settings."""

JOB: Mapping[str, Any] = {
    "run": {"name": "small", "dir": "runs", "seed": 1},
    "model": {"class": "mine.model:Net", "args": {}},
    "data": {"class": "mine.model:Data", "args": {"batch_size": 8}},
    "trainer": {
        "strategy": {"name": "xla"},
        "requeue": {"name": "exit_code"},
        "max_steps": 12,
        "val_check_interval": 4,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "gradient_clip_val": 1.0,
        "enable_model_summary": False,
        "checkpoint": {"every_n_steps": 4},
    },
}


def repository(folder: Path) -> Path:
    """A user's repository; returns its job file."""
    assert importlib.util.find_spec("torch_xla") is not None, "nox -s xla brings torch_xla; without it nothing is shown"
    (folder / "mine").mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    (folder / "mine" / "__init__.py").touch()
    (folder / "mine" / "model.py").write_text(MODEL)
    (folder / "job.yaml").write_text(json.dumps(JOB, indent=1))
    return folder / "job.yaml"


def run(
    cwd: Path, *settings: str, devices: int = 1, command: str = "fit", more: Sequence[str] = (), **environ: str
) -> Call:
    """A command on the job, as a user starts it, with so many XLA devices of PJRT on the CPU."""
    words = [*more, *(word for one in settings for word in ("--set", one))]
    variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices), **environ}
    return fairlead(command, "job.yaml", *words, cwd=cwd, environ=variables, fresh=True)


def newest(path: Path) -> Path:
    """The newest checkpoint of a run."""
    return path / "checkpoints" / (path / "checkpoints" / "latest").read_text().strip()


def state(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, as plain torch reads it."""
    loaded: dict[str, Any] = torch.load(path / "state.ckpt", weights_only=True)
    return loaded


def tensors(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Every tensor in a state, by its path."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    items = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value if isinstance(value, Mapping) else {}
    return {path: one for key, item in items.items() for path, one in tensors(item, f"{name}.{key}").items()}


def same(one: Path, other: Path) -> list[str]:
    """The names of all tensors in two checkpoints that differ in a bit, and the files that differ."""
    left, right = (tensors(state(path)) for path in (one, other))
    assert left.keys() == right.keys()
    wrong = [name for name in left if left[name].dtype != right[name].dtype or not torch.equal(left[name], right[name])]
    assert len(left) > 12
    ranks = [torch.load(path / "rank-00000.pt", weights_only=True) for path in (one, other)]
    wrong += ["generators"] if ranks[0]["rng"]["xla"] != ranks[1]["rng"]["xla"] else []
    return wrong
