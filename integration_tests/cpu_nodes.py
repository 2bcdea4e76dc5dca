"""A job for nodes of CPUs, with one process on each, and the weights that one process gets from the same samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

__all__ = ["STEPS", "TOLERANCE", "trained_alike", "write_job"]

STEPS = 24
BATCH = 8  # of all processes together
TOLERANCE = 5e-6
"""3e-7 with two ranks and 4e-7 with four was measured: their gradients are added up in another order."""

NET = """
import json
import os

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def training_step(self, batch, index):
        return (self.layer(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def on_train_end(self):
        weights = [parameter.tolist() for parameter in self.layer.parameters()]
        found = {"weights": weights, "threads": torch.get_num_threads(), "ranks": self.trainer.world_size}
        with open(f"rank-{self.global_rank}.json", "w") as file:
            json.dump(found, file)


class Points(L.LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        points = torch.randn(64, 4, generator=torch.Generator().manual_seed(3))
        return DataLoader(points, batch_size=self.batch_size)
"""


def write_job(folder: Path, nodes: int, **trainer: Any) -> Path:
    """Writes `net.py` and `job.yaml`, whose batch is the same in all with any number of nodes."""
    (folder / "net.py").write_text(NET, encoding="utf-8")
    job = {
        "run": {"name": "sine", "seed": 1},
        "model": {"class": "net:Net"},
        "data": {"class": "net:Points", "args": {"batch_size": BATCH // nodes}},
        "trainer": {"accelerator": "cpu", "max_steps": STEPS, "enable_model_summary": False, **trainer},
    }
    file = folder / "job.yaml"
    file.write_text(json.dumps(job), encoding="utf-8")
    return file


def by_hand(every: int = 1) -> list[torch.Tensor]:
    """The weights of one process in plain torch; with `every`, of a rank that trains on its share alone."""
    torch.manual_seed(1)
    layer = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.9)
    points = torch.randn(64, 4, generator=torch.Generator().manual_seed(3))
    for step in range(STEPS):
        batch = points[step * BATCH % 64 :][:BATCH][::every]
        optimizer.zero_grad()
        (layer(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in layer.parameters()]


def trained_alike(folder: Path, nodes: int, threads: int | None = None) -> None:
    """All ranks have the same bits, and to rounding the weights of one process that has seen the same samples."""
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(nodes)]
    assert {one["ranks"] for one in ranks} == {nodes}
    assert threads is None or {one["threads"] for one in ranks} == {threads}
    assert all(one["weights"] == ranks[0]["weights"] for one in ranks)
    weights = [torch.tensor(one) for one in ranks[0]["weights"]]
    apart = _largest(weights, by_hand())
    assert apart < TOLERANCE, apart
    assert _largest(by_hand(nodes), by_hand()) > 1000 * TOLERANCE, "a rank that trains alone would not be noticed"


def _largest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
