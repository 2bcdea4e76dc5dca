"""The page on LightningCLI and Hydra, run as it stands with the real jsonargparse and hydra-core."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest

from integration_tests.jobs import events

pytestmark = pytest.mark.full

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "lightning-cli-and-hydra.md"
NET = """
import hydra
import lightning.pytorch as L
import torch
from omegaconf import DictConfig
from torch.utils.data import DataLoader, TensorDataset

from fairlead import Fairlead


class Net(L.LightningModule):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(32, 1)), batch_size=8)
"""
HYDRA = """
name: net-${model.width}
seed: 1
model: {width: 16}
trainer: {max_epochs: 2, accelerator: cpu, enable_progress_bar: false}
"""


def block(kind: str, after: str) -> str:
    """The first fenced block of a kind behind a heading."""
    rest = PAGE.read_text().partition(f"## {after}\n")[2]
    found = re.search(rf"^```{kind}[^\n]*\n(.*?)^```", rest, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def run(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    words = shlex.split(line, comments=True)
    assert words[0] == "python"
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *words[1:]]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False)


def test_lightning_cli(tmp_path: Path) -> None:
    code = block("python", "LightningCLI")
    (tmp_path / "train.py").write_text(f"{NET}\nif __name__ == '__main__':\n{indent(code, ' ' * 4)}")
    (tmp_path / "config.yaml").write_text(block("yml", "LightningCLI"))
    first, further, other = block("sh", "LightningCLI").splitlines()
    for line in (first, first, further):
        done = run(tmp_path, line)
        assert done.returncode == 0, done.stdout + done.stderr
    ends = [event["epoch"] for event in events(tmp_path / "runs" / "cli") if event["event"] == "finished"]
    assert ends == [3, 5]
    refused = run(tmp_path, other)
    assert refused.returncode != 0
    assert "belongs to a run with other settings" in refused.stderr
    assert "width: 16 -> 8" in refused.stderr


def test_hydra(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(HYDRA)
    code = block("python", "Hydra")
    (tmp_path / "train.py").write_text(f"{NET}\n\n{code}\n\nif __name__ == '__main__':\n    main()\n")
    one, sweep = block("sh", "Hydra").splitlines()
    for line in (one, sweep, sweep):
        done = run(tmp_path, line)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("is finished") == 2
    assert {run.name for run in (tmp_path / "runs").iterdir() if run.is_dir()} == {"net-16", "net-4", "net-8"}
