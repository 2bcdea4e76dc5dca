"""A run goes on with another number of ranks inside an epoch: every sample is trained on once, and only once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integration_tests.jobs import changed, fairlead

pytestmark = pytest.mark.full

MODEL = """
import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(range(50), batch_size=2, shuffle=True, num_workers=1)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, index):
        with open(f"trained-{self.trainer.current_epoch}.txt", "a") as file:
            file.writelines(f"{self.global_step} {sample}\\n" for sample in batch.tolist())
        return (self.weight - batch.float().mean()).square()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
"""

JOB: dict[str, Any] = {
    "run": {"name": "small", "dir": "runs", "seed": 1},
    "model": {"class": "model:Model"},
    "data": {"class": "model:Data"},
    "trainer": {
        "accelerator": "cpu",
        "strategy": "auto",
        "batch_policy": "keep_global",
        "max_epochs": 2,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
}


def trained(folder: Path, epoch: int) -> dict[int, list[int]]:
    """The samples of each optimizer step, sorted."""
    steps: dict[int, list[int]] = {}
    for line in (folder / f"trained-{epoch}.txt").read_text().splitlines():
        step, sample = map(int, line.split())
        steps.setdefault(step, []).append(sample)
    return {step: sorted(samples) for step, samples in steps.items()}


def start(folder: Path, devices: int, **trainer: Any) -> None:
    job = folder / "job.json"
    job.write_text(json.dumps(changed(JOB, trainer={"devices": devices, **trainer})))
    ended = fairlead("fit", str(job), cwd=folder)
    assert ended.code == 0, ended.text


@pytest.mark.slow
def test_what_is_left_of_an_epoch_is_shared_by_other_ranks(tmp_path: Path) -> None:
    """4 ranks, then 1, then 2: each step takes the same eight samples as with 4 throughout."""
    for name, starts in (("throughout", [(4, {})]), ("changing", [(4, 2), (1, 5), (2, None)])):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "pyproject.toml").touch()
        (folder / "model.py").write_text(MODEL)
        for devices, steps in starts:
            start(folder, devices, **({"max_steps": steps} if steps else {}))
    for epoch in (0, 1):
        one, other = (trained(tmp_path / name, epoch) for name in ("throughout", "changing"))
        whole = {step: samples for step, samples in one.items() if len(samples) == 8 and step % 7 != 6}
        assert len(whole) == 6
        assert {step: other[step] for step in whole} == whole
        assert {sample for samples in other.values() for sample in samples} == set(range(50))
