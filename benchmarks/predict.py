"""What it costs to keep what a model predicts: a small network, one process, one thread, 10 class scores a sample.

The same forward loop takes turns by hand, where it keeps nothing, and with the Trainer, whose predictions are on disk
in the end, fsynced and hashed. `memory_growth` is the peak memory of a process that predicts eight times the samples,
against one that predicts them once, 4 KB a sample; both read all of them again, one by one.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._stats import Ratio, options, paired_ratio, report, take_turns
from fairlead import RunConfig, Trainer, TrainerConfig
from fairlead_distributed import Predictions
from fairlead_lightning.display.quiet import quiet

WIDTH, CLASSES, BATCH = 256, 10, 512
LARGE = 1000  # numbers a sample, where memory is what is measured: all of them would be far more than the process has
GROWTH = "--memory-of"
"""With a number of samples: the benchmark predicts them and prints its own peak memory in bytes."""


class Samples(Dataset[Tensor]):
    """So many samples, of which none takes memory.

    Args:
        count: How many there are.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.sample = torch.randn(WIDTH)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return self.sample


class Net(L.LightningModule):
    """Three layers of 1024, and class scores, float32, (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        inner = [layer for _ in range(2) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
        self.layers = nn.Sequential(nn.Linear(WIDTH, 1024), nn.ReLU(), *inner, nn.Linear(1024, CLASSES))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The class scores."""
        scores: Tensor = self.layers(batch)
        return scores


def by_hand(model: Net, loader: DataLoader[Tensor]) -> float:
    """Seconds of a bare forward loop."""
    model.eval()
    begin = time.perf_counter()
    with torch.inference_mode():
        for number, batch in enumerate(loader):
            model.predict_step(batch, number)
    return time.perf_counter() - begin


class Wide(L.LightningModule):
    """One number of a sample, so many times."""

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Float32, (batch, 1000)."""
        return batch[:, :1].expand(-1, LARGE)


class _Span(L.Callback):
    """From the first batch to where the predictions are complete on the disk."""

    began = 0.0

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.began = time.perf_counter()


def fairlead(model: L.LightningModule, loader: DataLoader[Tensor], folder: Path) -> float:
    """Seconds from the first batch to the end of the commit."""
    span = _Span()
    # Its set-up is not counted: what a forward loop by hand needs before its first batch is not, either.
    config = TrainerConfig(accelerator="cpu", devices=1, enable_progress_bar=False)
    trainer = Trainer(config, run=RunConfig(name="predict", dir=str(folder)), callbacks=[span])
    shutil.rmtree(folder / "out", ignore_errors=True)
    with quiet():
        trainer.distributed_predict(model, loader, output_dir=folder / "out", ckpt_path="never")
    return time.perf_counter() - span.began


def stored(folder: Path) -> int:
    """The bytes of all files of the predictions."""
    return sum(path.stat().st_size for path in (folder / "out").iterdir())


def memory_of(samples: int) -> int:
    """This process's peak memory in bytes, once it has predicted so many samples and read them again."""
    with tempfile.TemporaryDirectory(prefix="fairlead-predict-") as folder:
        fairlead(Wide(), DataLoader(Samples(samples), batch_size=BATCH), Path(folder))
        read = sum(1 for _ in Predictions(Path(folder, "out")))
    assert read == samples, f"{read} of {samples} samples"
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak(samples: int) -> int:
    """The same in a process of its own."""
    command = [sys.executable, __file__, GROWTH, str(samples)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    if GROWTH in sys.argv:
        torch.set_num_threads(1)
        print(memory_of(int(sys.argv[-1])))
        return
    given = options(__doc__, rounds=15)
    torch.set_num_threads(1)
    samples = 1_000 if given.quick else 60_000
    model, loader = Net(), DataLoader(Samples(samples), batch_size=BATCH)
    with tempfile.TemporaryDirectory(prefix="fairlead-predict-") as folder:
        sides: dict[str, Any] = {
            "by hand": lambda: by_hand(model, loader),
            "Fairlead": lambda: fairlead(model, loader, Path(folder)),
        }
        seconds = take_turns(sides, given.rounds)
        share = stored(Path(folder)) / (samples * CLASSES * 4)
    few = 2_000 if given.quick else 40_000  # more than a shard that is written, and one that is gathered
    growth = [peak(8 * few) / peak(few) for _ in range(1 if given.quick else 3)]
    ratios = {
        "speed_vs_bare": paired_ratio(seconds["by hand"], seconds["Fairlead"], bound=0.95, at_least=True),
        "bytes_vs_tensors": Ratio(share, share, share, 1.05),
        "memory_growth": Ratio(sorted(growth)[len(growth) // 2], min(growth), max(growth), 1.05),
    }
    report("predict", ratios, seconds, given, samples=samples, samples_for_memory=[few, 8 * few])


if __name__ == "__main__":
    main()
