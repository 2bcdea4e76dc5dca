"""A step of each strategy, with the Trainer and by hand in plain torch, over gloo with one thread each.

The same blocks of two linear layers, split in the same way, in the same processes and the same process group; the two
sides take turns.  By hand means torch's own `DistributedDataParallel`, `fully_shard`, `parallelize_module` and
`torch.distributed.pipelining`, in a loop that does nothing else.

Both sides keep the memory that they free for the next step. Otherwise glibc gives some of it back to the system at one
step and takes it again at the next, which costs a fifth of a pipeline's step on one side or the other, as the layout of
the heap will have it.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._stats import Options, Ratio, options, paired_ratio, report, take_turns
from benchmarks._training import Workload
from fairlead_distributed.testing import run_ranks

WIDTH: Final = 512
BLOCKS: Final = 4
BOUND: Final = 1.03
# The Trainer recognises ranks that an elastic agent has started.
LAUNCHER: Final = {"TORCHELASTIC_RUN_ID": "benchmark", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}


class Block(nn.Module):
    """Two linear layers, added to what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) -> (batch, width)."""
        return x + self.down(self.up(x).relu())  # type: ignore[no-any-return]


class Stack(L.LightningModule):
    """Blocks, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) -> (batch, width)."""
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """How far the blocks are from doing nothing."""
        return self.pipeline_loss(self(batch[0]), batch[0])

    def pipeline_layers(self) -> list[nn.Module]:
        """What stages are made of."""
        return list(self.blocks)

    def pipeline_loss(self, output: Tensor, x: Tensor) -> Tensor:
        """The same of a part of the batch."""
        return (output - x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD: the cheapest, so that what surrounds it shows most."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def ddp(net: Stack) -> nn.Module:
    """A full copy on each rank."""
    return nn.parallel.DistributedDataParallel(net)


def fsdp2(net: Stack) -> nn.Module:
    """Each block a unit, over all ranks."""
    return _sharded(net, init_device_mesh("cpu", (dist.get_world_size(),)))


def hsdp(net: Stack) -> nn.Module:
    """Shards over pairs of ranks, which are copies of each other."""
    return _sharded(net, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def _sharded(net: Stack, mesh: Any) -> nn.Module:
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh, reshard_after_forward=False)
    return net


def tensor(net: Stack) -> nn.Module:
    """The columns of the first layer of a block, the rows of the second."""
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return parallelize_module(net, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


class Pipeline(nn.Module):
    """Half of the blocks on each rank, and torch's schedule for them."""

    def __init__(self, net: Stack) -> None:
        super().__init__()
        rank, stages = dist.get_rank(), dist.get_world_size()
        each = BLOCKS // stages
        blocks = nn.Sequential(*net.blocks[rank * each : (rank + 1) * each])
        self.last = rank == stages - 1
        stage = PipelineStage(blocks, rank, stages, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=net.pipeline_loss)

    def learn(self, x: Tensor) -> Tensor:
        """A batch forward and backward; the loss, on the last rank."""
        losses: list[Tensor] = []
        first = (x,) if dist.get_rank() == 0 else ()
        self.schedule.step(*first, target=x if self.last else None, losses=losses if self.last else None)
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())


MICRO_BATCHES: Final = 4
PLAN: Final = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
STRATEGIES: Final[Mapping[str, tuple[int, Any, Callable[[Stack], nn.Module]]]] = {
    "ddp": (2, "ddp", ddp),
    "fsdp2": (2, "fsdp2", fsdp2),
    "tensor_parallel": (2, {"name": "tensor_parallel", "plan": PLAN}, tensor),
    "pipeline_parallel": (2, {"name": "pipeline_parallel", "micro_batches": MICRO_BATCHES}, Pipeline),
    "hsdp": (4, {"name": "hybrid", "replicate": 2, "shard": 2}, hsdp),
}
"""The number of ranks, the strategy in a job, and the same by hand."""


class StackWorkload(Workload):
    """The stack, split by one of the functions above."""

    split: Callable[[Stack], nn.Module]

    def _net(self) -> Stack:
        torch.manual_seed(0)
        return Stack()

    def _wrap(self, net: L.LightningModule) -> nn.Module:
        assert isinstance(net, Stack)
        return self.split(net)

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = (model(batch[0]) - batch[0]).square().mean()
        return loss

    def _learn(self, model: nn.Module, batch: Any) -> Tensor:
        return model.learn(batch[0]) if isinstance(model, Pipeline) else super()._learn(model, batch)

    def _loader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.batch_size, WIDTH, generator=generator)
        samples = TensorDataset(x.repeat(self._total * dist.get_world_size(), 1))
        return DataLoader(samples, batch_size=self.batch_size)


def keep_freed_memory() -> None:
    """What `MALLOC_TRIM_THRESHOLD_` and `MALLOC_MMAP_THRESHOLD_` do at the start of a process; where glibc is."""
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        adjust(-1, 1 << 30)  # M_TRIM_THRESHOLD
        adjust(-3, 1 << 25)  # M_MMAP_THRESHOLD, the most that it can be


def rank_main(rank: int, name: str, folder: str, given: Options) -> dict[str, list[float]]:
    """What one rank measures: seconds of a step, by side and turn."""
    keep_freed_memory()
    Tqdm.set_lock(threading.RLock())  # its own lock is a semaphore that outlives a rank
    ranks, strategy, split = STRATEGIES[name]
    work = StackWorkload(
        Path(folder, name),
        widths=(),  # the model is the stack
        batch_size=64,
        warm_up=2 if given.quick else 4,
        steps=3 if given.quick else 12 if ranks == 2 else 3,  # four ranks on two cores wait for each other
        expected_s=0.1,
        settings={"devices": ranks, "strategy": strategy},
    )
    work.split = split
    sides = {"by hand": lambda: work.by_hand(distributed=True), "Fairlead": work.fairlead}
    seconds = take_turns(sides, given.rounds)
    dist.barrier()
    return seconds


def main() -> None:
    given = options(__doc__, rounds=11)
    ratios: dict[str, Ratio] = {}
    raw: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="fairlead-strategies-") as folder:
        for name, (ranks, *_) in STRATEGIES.items():
            # All ranks wait for each other in every step, so one of them tells the time of all.
            seconds = run_ranks(rank_main, ranks, name, folder, given, timeout=3600, env=LAUNCHER)[0]
            ratios[f"{name}_vs_raw"] = paired_ratio(seconds["Fairlead"], seconds["by hand"], bound=BOUND)
            raw |= {f"{name}, {side}": taken for side, taken in seconds.items()}
    parameters = sum(parameter.numel() for parameter in Stack().parameters())
    report("strategies", ratios, raw, given, parameters=parameters)


if __name__ == "__main__":
    main()
