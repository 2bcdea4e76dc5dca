"""A script whose ranks are started by the strategy itself: `python spawned.py spawn|fork OUT`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fairlead_strategies import DDPStrategyConfig
from fairlead_strategies.ddp_runtime import build


class Tiny(pl.LightningModule):
    """One weight per input."""

    def __init__(self, out: str) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.out = out

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.layer(batch).pow(2).mean()
        return loss

    def on_train_end(self) -> None:
        everyone = self.all_gather(self.layer.weight.detach())
        if self.global_rank == 0:
            same = bool((everyone[0] == everyone[-1]).all())
            Path(self.out).write_text(json.dumps({"world": self.trainer.world_size, "same": same}))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    method: Any = sys.argv[1]
    ranks: Any = importlib.import_module("ranks")  # beside this file
    config = DDPStrategyConfig(start_method=method)
    strategy: Any = build(config, ranks.context(config))
    data: Any = [torch.ones(2) * i for i in range(8)]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Tiny(sys.argv[2]), DataLoader(data, batch_size=2))
