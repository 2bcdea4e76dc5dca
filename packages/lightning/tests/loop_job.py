"""A user's own loop on Fabric, with all that makes a resume hard: dropout, momentum, a schedule, uneven epochs.

`python loop_job.py ROOT OUT` trains to the end and writes all final states to OUT.  The environment says the rest:
RANKS, WORKERS, STRATEGY, KILL=`rank:where:count` (every process of the job dies when that rank comes to that place for
the count-th time; with a `!` only that rank).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.fabric as lf
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fairlead import LoopRun, TrainerConfig, fabric
from fairlead.config import CheckpointConfig
from fairlead_distributed import ResumableDistributedSampler
from fairlead_runs.commit import Syscalls

EPOCHS = 3
SAMPLES = 43  # 11 batches of 4 on one rank, 6 on two; the last is not full, and two ranks share an odd number
EVERY = 4


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points with noise that is drawn where the sample is made: without workers, from the global generator."""

    def __init__(self, noisy: bool) -> None:
        self.noisy = noisy

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.tensor([index / SAMPLES, (index * 7 % SAMPLES) / SAMPLES, 1.0])
        return x + 0.01 * torch.randn(3) if self.noisy else x, x.sum().reshape(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class Killer:
    """Kills at a place."""

    def __init__(self, rank: int) -> None:
        who, self.where, count = os.environ.get("KILL", "-1::0").split(":")
        self.alone = who.startswith("!")
        self.left = int(count) if int(who.lstrip("!")) == rank else -1

    def at(self, where: str) -> None:
        if where != self.where or self.left < 0:
            return
        self.left -= 1
        if self.left <= 0:
            os.kill(os.getpid(), signal.SIGKILL) if self.alone else os.killpg(0, signal.SIGKILL)

    def watch_saves(self) -> None:
        """Each system call of a commit is a place too."""
        for name in ("write", "fsync", "rename", "mkdir", "unlink"):
            real = getattr(Syscalls, name)

            def call(*args: Any, _name: str = name, _real: Any = real, **kwargs: Any) -> Any:
                self.at(_name)
                return _real(*args, **kwargs)

            setattr(Syscalls, name, call)


def make_fabric(ranks: int, strategy: str) -> lf.Fabric:
    """`sharded` and `sharded-folder` are FSDP2, saved as one file and as a folder of each rank's parts."""
    if strategy.startswith("sharded"):
        chosen: Any = {"name": "fsdp2", "save_distributed_checkpoint": strategy.endswith("folder")}
    else:
        chosen = strategy
    return fabric(TrainerConfig(accelerator="cpu", devices=ranks, strategy=chosen))


def main(root: Path, out: Path) -> None:
    ranks, workers = int(os.environ.get("RANKS", "1")), int(os.environ.get("WORKERS", "0"))
    fab = make_fabric(ranks, os.environ.get("STRATEGY", "auto"))
    fab.launch()
    rank = fab.global_rank
    torch.manual_seed(10 + rank)
    random.seed(20 + rank)
    np.random.seed(30 + rank)
    killer = Killer(rank)
    model = fab.setup_module(Net())
    optimizer: Any = fab.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [9, 15])
    sampler = ResumableDistributedSampler(SAMPLES, seed=3)
    loader = DataLoader(Points(noisy=workers == 0), batch_size=4, sampler=sampler, num_workers=workers)
    killer.at("start")
    with LoopRun(
        fab,
        root / "run",
        config={"lr": 0.1, "max_epochs": EPOCHS},
        checkpoint=CheckpointConfig(keep_last=2),
        per_rank={"drawn": 0.0},
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        sampler=sampler,
        best=float("inf"),
    ) as run:
        killer.watch_saves()
        killer.at("restore")
        run.restore()
        for run.epoch in range(sampler.epoch, EPOCHS):
            for x, y in run.batches(loader):
                killer.at("batch")
                loss = nn.functional.mse_loss(model(x), y)
                fab.backward(loss)
                killer.at("backward")
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                run.step += 1
                killer.at("step")
                run.state["best"] = min(run.state["best"], np.float64(loss.item()) if ranks == 1 else 0.0)
                run.per_rank["drawn"] += random.random() + np.random.rand()
                run.log({"train/loss": loss, "lr": scheduler.get_last_lr()[0]})
                if run.step % EVERY == 0:
                    run.save(metrics={"val_loss": loss})
            killer.at("epoch")
        run.finish()
        killer.at("end")
        final = {
            "model": {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()},
            "optimizer": [
                {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in optimizer.state[p].items()}
                for p in model.parameters()
            ],
            "scheduler": scheduler.state_dict(),
            "sampler": sampler.state_dict(),
            "best": float(run.state["best"]),
            "drawn": run.per_rank["drawn"],
            "next": [torch.rand(2), random.random(), float(np.random.rand())],
            "step": run.step,
        }
    out.mkdir(exist_ok=True)
    torch.save(final, out / f"{rank}.pt")


def become_rank(environ: dict[str, str], root: Path, log: Path) -> None:
    """Makes a fork of a process that has the imports behind it what a fresh process would be."""
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # of loaders, as in a script
    os.environ.update(environ)
    sys.argv = [__file__]
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    main(root, root / "out")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
