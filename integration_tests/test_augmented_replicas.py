"""Random augmentation in loader workers, where several ranks share a batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fairlead import RunConfig, Trainer, TrainerConfig
from fairlead_distributed.testing import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.full]

BOTH = {"name": "hybrid", "shard": 2, "tensor": 2, "plan": {"net.0": "colwise", "net.2": "rowwise"}}


class Noisy(Dataset[Tensor]):
    """Each sample is drawn when it is loaded, from the three libraries that augmentation draws from."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), float(torch.rand(()))])


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.seen: list[Tensor] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.seen.append(batch.clone())
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def seen(rank: int, root: str) -> Tensor:
    config: dict[str, Any] = {"accelerator": "cpu", "devices": 4, "strategy": BOTH, "max_steps": 4}
    config |= {
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    net = Net()
    run = RunConfig(name="run", dir=root, seed=1)
    Trainer(TrainerConfig.model_validate(config), run=run).fit(net, DataLoader(Noisy(), batch_size=4, num_workers=2))
    return torch.stack(net.seen)


def test_ranks_of_a_batch_augment_it_alike_and_replicas_do_not(tmp_path: Path) -> None:
    """Ranks 0 and 1 have the parts of one replica, 2 and 3 those of the other."""
    first, second, third, fourth = run_ranks(seen, 4, str(tmp_path), timeout=300)
    assert first.shape == (4, 4, 4)
    assert torch.equal(first, second)
    assert torch.equal(third, fourth)
    assert not set(first[..., 0].flatten().tolist()) & set(third[..., 0].flatten().tolist())
    for drawn in range(1, 4):
        assert not set(first[..., drawn].flatten().tolist()) & set(third[..., drawn].flatten().tolist())
        assert len(set(first[..., drawn].flatten().tolist())) == 16
