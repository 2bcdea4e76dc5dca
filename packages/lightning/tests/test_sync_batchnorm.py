"""`sync_batchnorm` on CPUs: two ranks end with the weights and statistics of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_job import Line, make_trainer, samples
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fairlead_distributed.testing import run_ranks


class Normed(Line):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = nn.Sequential(nn.BatchNorm1d(3), self.net)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


def trained(root: Path, batch: int, **config: Any) -> dict[str, Tensor]:
    model = Normed()
    make_trainer(root, max_epochs=1, **config).fit(model, DataLoader(samples(), batch), DataLoader(samples(8), batch))
    return {name: one.detach().clone() for name, one in model.state_dict().items()}


def on_two_ranks(rank: int, root: Path) -> dict[str, Any]:
    two: dict[str, Any] = {"devices": 2, "strategy": "ddp"}
    return {
        "shorthand": trained(root / "shorthand", 4, **two, sync_batchnorm=True),
        "layer_sync": trained(root / "layer_sync", 4, **two, layer_sync="torch_sync_batchnorm"),
        "local": trained(root / "local", 4, **two, on_divergence="ignore"),
    }


def test_is_one_process(tmp_path: Path) -> None:
    one = trained(tmp_path / "one", 8, sync_batchnorm=True)
    for got in run_ranks(on_two_ranks, 2, tmp_path, timeout=120):
        for name, expected in one.items():
            torch.testing.assert_close(got["shorthand"][name], expected)
            torch.testing.assert_close(got["layer_sync"][name], expected)
        assert not torch.allclose(got["local"]["net.0.running_var"], one["net.0.running_var"])
