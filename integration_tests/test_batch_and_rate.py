"""Two ranks share a global batch and scale the learning rate as one process would: the same weights, in numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integration_tests.jobs import Call, changed, fairlead

pytestmark = pytest.mark.full

MODEL = """
import json
import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Data(L.LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return DataLoader(TensorDataset(x, x.sum(1)), batch_size=self.batch_size, shuffle=True)


class Model(L.LightningModule):
    def __init__(self, lr=0.01):
        super().__init__()
        self.lr = lr
        self.layer = torch.nn.Linear(3, 1).double()
        self.rates = []

    def training_step(self, batch, index):
        x, y = batch
        if not self.rates or self.rates[-1][0] != self.global_step:
            self.rates.append((self.global_step, self.optimizers().param_groups[0]["lr"]))
        return (self.layer(x)[:, 0] - y).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12, eta_min=0.001)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_end(self):
        if self.global_rank == 0:
            with open("ended.json", "w") as file:
                json.dump({"weights": self.layer.weight.tolist(), "rates": self.rates}, file)
"""

JOB: dict[str, Any] = {
    "run": {"name": "small"},
    "model": {"class": "model:Model"},
    "data": {"class": "model:Data", "args": {"batch_size": 8}},
    "trainer": {"accelerator": "cpu", "strategy": "auto", "enable_model_summary": False},
}


def start(folder: Path, *, code: int = 0, args: dict[str, Any] | None = None, **trainer: Any) -> Call:
    job = changed(JOB, trainer=trainer, data={"args": {"batch_size": 8, **(args or {})}})
    (folder / "job.json").write_text(json.dumps(job))
    ended = fairlead("fit", "job.json", cwd=folder)
    assert ended.code == code, ended.text
    return ended


def ended(folder: Path) -> tuple[list[float], list[float]]:
    """The weights, and the learning rate of each step, over all starts."""
    found = json.loads((folder / "ended.json").read_text())
    return found["weights"][0], [rate for _, rate in found["rates"]]


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    made = {}
    for name in ("ranks", "alone"):
        made[name] = tmp_path / name
        made[name].mkdir()
        (made[name] / "pyproject.toml").touch()
        (made[name] / "model.py").write_text(MODEL)
    return made


def close(found: list[float], wanted: list[float]) -> bool:
    return found == pytest.approx(wanted, rel=1e-11)


@pytest.mark.slow
def test_two_ranks_share_a_global_batch_and_train_as_one(folders: dict[str, Path]) -> None:
    """16 samples a step on two ranks, then on one: the weights of one process with batches of 16 and twice the rate."""
    shared: dict[str, Any] = {"batch_size": "global", "base_batch_size": 4, "lr_rule": "sqrt"}
    first = start(folders["ranks"], args={"batch_size": 16}, devices=2, max_steps=3, **shared)
    assert "learning rate 0.01 -> 0.02: x 2, lr_rule sqrt: global batch 16 / base_batch_size 4" in first.out
    assert "batch 8 per device x 2 devices = 16 in all" in first.out
    second = start(folders["ranks"], args={"batch_size": 16}, devices=1, max_steps=6, **shared)
    assert "learning rate" not in second.text  # once
    assert "settings-changed" not in second.text  # its share is another, and no change of the job
    refused = start(folders["ranks"], args={"batch_size": 16}, code=2, devices=3, max_steps=6, **shared)
    assert "the nearest sizes that can: 15 or 18" in refused.err
    (folders["alone"] / "model.py").write_text(MODEL.replace("lr=0.01", "lr=0.02").replace("0.001", "0.002"))
    start(folders["alone"], args={"batch_size": 16}, devices=1, max_steps=6)
    weights, rates = ended(folders["ranks"])
    expected, by_hand = ended(folders["alone"])
    assert close(weights, expected)
    assert close(rates, by_hand)


@pytest.mark.slow
def test_the_rate_follows_the_ranks_of_each_start_once(folders: dict[str, Path]) -> None:
    """Each rank keeps its batch of 8: 2 ranks, 1, 2 again; then 1 that keeps the global batch, and with it the rate."""
    told = []
    for devices, steps, policy in (
        (2, 2, None),
        (1, 4, "keep_per_device"),
        (2, 6, "keep_per_device"),
        (1, 8, "keep_global"),
    ):
        said = start(folders["ranks"], devices=devices, max_steps=steps, base_batch_size=8, batch_policy=policy).out
        told.append(
            next((line.partition(", lr_rule")[0] for line in said.splitlines() if "learning rate" in line), None)
        )
    assert told == [
        "learning rate 0.01 -> 0.02: x 2",
        "learning rate 0.02 -> 0.01: x 0.5, so x 1 in all",
        "learning rate 0.01 -> 0.02: x 2",
        None,
    ]
    start(folders["alone"], devices=1, max_steps=8)
    factors = [2.0, 2.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    rates = ended(folders["ranks"])[1]
    assert close(rates, [rate * factor for rate, factor in zip(ended(folders["alone"])[1], factors, strict=True)])
