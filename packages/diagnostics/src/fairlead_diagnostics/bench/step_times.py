"""Inside the ranks of a trial: times its steps, with the ranks' communication and without, and ends the training."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as L
import torch

from fairlead_distributed.batch_sizes import batch_size

MOST_LOSSES: Final = 200
"""Batches, from the first on, whose losses are recorded."""


class StepTimes(L.Callback):
    """Times blocks of steps; each rank leaves a file in `folder`, `rank-00000.json`.

    In every second block the ranks send each other no gradients (`no_sync` of what the strategy has wrapped the model
    in); what a step takes less there is the communication that it waits for. The first step of an epoch, which waits
    for the loader, and the first of a block, in which ranks wait for each other, are not counted.

    Args:
        folder: Where the ranks leave their files.
        warm_up: Optimizer steps before the first block.
        blocks: Optimizer steps of each block.
    """

    def __init__(self, folder: str, warm_up: int, blocks: list[int]) -> None:
        self._folder = Path(folder)
        self._lengths = [warm_up, *blocks]
        self._ends: list[int] = []
        self._batches = 1  # of one optimizer step
        self._block = self._began = self._done = 0
        self._last = 0.0
        self._losses: list[Any] = []
        self._quiet = ExitStack()
        self._spent = {True: [0.0, 0, 0], False: [0.0, 0, 0]}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Training is about to begin."""
        self._batches = int(trainer.accumulate_grad_batches)
        self._ends = list(accumulate(length * self._batches for length in self._lengths))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Switches communication off where a block without it begins."""
        if self._without and self._done == self._began:
            no_sync = getattr(trainer.strategy.model, "no_sync", None)
            if no_sync is None:  # a strategy that cannot
                self._finish(trainer)
            else:
                self._quiet.enter_context(no_sync())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch is done."""
        now = time.perf_counter()
        counts = self._block > 0 and batch_idx > 0 and self._done - self._began >= self._batches
        if counts and self._block < len(self._ends):
            spent = self._spent[not self._without]
            spent[0] += now - self._last
            spent[1] += 1
            spent[2] += batch_size(batch)
        self._last = now
        self._done += 1
        if self._block < 2 and len(self._losses) < MOST_LOSSES and isinstance(outputs, Mapping):
            self._losses.append(outputs.get("loss"))  # a tensor: reading it would wait for the device
        if self._block < len(self._ends) and self._done == self._ends[self._block]:
            self._quiet.close()
            self._block += 1
            self._began = self._done
        if self._block == len(self._ends):
            self._finish(trainer)

    @property
    def _without(self) -> bool:
        """Whether this is a block without communication."""
        return 0 < self._block < len(self._ends) and self._block % 2 == 0

    def _finish(self, trainer: L.Trainer) -> None:
        self._block = len(self._ends)
        trainer.should_stop = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leaves what was measured."""
        (seconds, batches, samples), (quiet_seconds, quiet_batches, _) = self._spent[True], self._spent[False]
        found = {
            "complete": self._block == len(self._ends),
            "seconds": seconds,
            "batches": batches,
            "samples": samples,
            "seconds_without": quiet_seconds,
            "batches_without": quiet_batches,
            "batches_of_a_step": self._batches,
            "memory": _memory(),
            "losses": [float(loss) for loss in self._losses if loss is not None],
            "epoch_batches": trainer.num_training_batches if trainer.num_training_batches != float("inf") else None,
            "host": socket.gethostname(),
            **_model_and_device(trainer, pl_module),
        }
        (self._folder / f"rank-{trainer.global_rank:05d}.json").write_text(json.dumps(found))


class KilledOnce(L.Callback):
    """Kills the last rank, and leaves when that was and when the next start has taken its first step.

    Args:
        folder: Where the times are left, in `killed` and `recovered`.
        step: The optimizer step behind which it is killed, later than a checkpoint.
    """

    def __init__(self, folder: str, step: int) -> None:
        self._folder, self._step = Path(folder), step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """A batch is done."""
        killed = self._folder / "killed"
        if killed.exists():
            (self._folder / "recovered").write_text(repr(time.time()))
            trainer.should_stop = True
        elif trainer.global_step >= self._step and trainer.global_rank == trainer.world_size - 1:
            killed.write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


def _model_and_device(trainer: L.Trainer, model: L.LightningModule) -> dict[str, Any]:
    device = trainer.strategy.root_device
    cuda = device.type == "cuda"
    return {
        "model": type(model).__name__,
        "parameters": sum(one.numel() for one in model.parameters()),
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "device_memory": torch.cuda.max_memory_allocated(device) if cuda else None,
    }


def _memory() -> int:
    """Bytes of this process; pages that processes share are divided among them, where the system says so."""
    try:
        text = Path("/proc/self/smaps_rollup").read_text()
        return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
