"""A plain loop of torch with all that makes a resume hard: dropout, momentum, a schedule, uneven epochs.

`python run_job.py ROOT OUT` trains to the end and writes all final states to OUT.  The environment says the rest:
WORKERS, STYLE (`batches`, or `epochs` with a validation behind each), KIND (ddp, fsdp, fsdp-gathered, hsdp, tensor),
KILL=`rank:where:count` (every process of the job dies when that rank comes to that place for the count-th time; with a
`!` only that rank).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fairlead import Run
from fairlead_distributed import DistributedDataParallel, get_rank, process_group
from fairlead_runs.commit import Syscalls

EPOCHS = 3
SAMPLES = 43  # 11 batches of 4 on one rank, 6 on two; the last is not full, and two ranks share an odd number
EVERY = 4


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points with noise that is drawn where the sample is made: without workers, from the global generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.tensor([index / SAMPLES, (index * 7 % SAMPLES) / SAMPLES, 1.0])
        return x + 0.01 * torch.randn(3), x.sum().reshape(1)


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


def made(kind: str) -> nn.Module:
    net = Net()
    if kind.startswith("fsdp"):
        from torch.distributed.fsdp import fully_shard

        fully_shard(net.layers[4])
        fully_shard(net)
        return net
    if kind == "hsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        return net
    if kind == "tensor":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        whole, cut = nn.Linear(3, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        net.layers = nn.Sequential(whole, parallelize_module(cut, init_device_mesh("cpu", (2,)), plan))
        return net
    return DistributedDataParallel(net)


def main(root: Path, out: Path) -> None:
    workers, kind = int(os.environ.get("WORKERS", "0")), os.environ.get("KIND", "ddp")
    with process_group():
        rank = get_rank()
        torch.manual_seed(10)
        model: Any = made(kind)
        apart = 0 if kind == "tensor" else rank  # its ranks have the same batches
        torch.manual_seed(10 + apart)
        random.seed(20 + apart)
        np.random.seed(30 + apart)
        killer = Killer(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [9, 15])
        loader = DataLoader(Points(), batch_size=4, shuffle=True, num_workers=workers)
        killer.at("start")
        with Run(
            root / "run",
            config={"lr": 0.1},
            max_epochs=EPOCHS,
            checkpoint={"keep_last": 2, "every_n_steps": EVERY},
            log_every_n_steps=1,
            gather=kind == "fsdp-gathered",
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            per_rank={"drawn": np.random.default_rng(rank)},
        ) as run:
            run.state["best"] = 9.0
            killer.watch_saves()
            killer.at("restore")
            run.restore()

            def one(x: Tensor, y: Tensor) -> None:
                killer.at("batch")
                loss: Any = nn.functional.mse_loss(model(x), y)
                loss.backward()
                killer.at("backward")
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                run.step(loss=loss, lr=scheduler.get_last_lr()[0])
                killer.at("step")
                if run.due(every=3):
                    with run.phase("validate"):
                        run.log({"val/loss": random.random() + np.random.rand()})  # draws, as an evaluation may
                run.state["best"] = min(run.state["best"], run.steps / 100)

            if os.environ.get("STYLE") == "epochs":
                for _ in run.epochs():
                    for x, y in run.batches(loader):
                        one(x, y)
                    killer.at("epoch")
                    run.log(drawn=torch.rand(1))
            else:
                for x, y in run.batches(loader):
                    one(x, y)
            run.finish()
            killer.at("end")
            final = {
                "model": {k: full(v) for k, v in model.state_dict().items()},
                "optimizer": [{k: full(v) for k, v in optimizer.state[p].items()} for p in model.parameters()],
                "scheduler": scheduler.state_dict(),
                "best": float(run.state["best"]),
                "next": [torch.rand(2), random.random(), float(np.random.rand())],
                "step": run.steps,
            }
        out.mkdir(exist_ok=True)
        torch.save(final, out / f"{rank}.pt")


def full(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


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
