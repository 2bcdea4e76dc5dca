"""The most memory that a step of our own strategies takes, on CPUs, beside what `fairlead plan` says of it.

    fairlead launch -n 4 benchmarks/plan/measure_memory.py --json memory.json

Each case is three steps of a Trainer; the last is measured, on each rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.plan.alive import AliveBytes, bytes_now
from benchmarks.plan.models import SMALL
from examples.gpt.mixture import MixtureGPT
from examples.gpt.model import GPT
from fairlead import Trainer
from fairlead.config import RunConfig, TrainerConfig

warnings.filterwarnings("ignore")
PARTS = {
    "example": "examples.gpt.model:Block",
    "example mixture": "examples.gpt.mixture:MixtureBlock",
    "gpt": "benchmarks.plan.models:GPTBlock",
    "llama": "benchmarks.plan.models:LlamaBlock",
    "vit": "torch.nn:TransformerEncoderLayer",
    "mixture": "benchmarks.plan.models:MixtureBlock",
}
STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "fsdp2": {"name": "fsdp2"},
    "fsdp2 kept": {"name": "fsdp2", "reshard_after_forward": False},
    "fsdp2 checkpointed": {"name": "fsdp2"},
    "hsdp": {"name": "hybrid", "replicate": 2, "shard": 2},
    "tensor": {"name": "hybrid", "tensor": 4},
    "tensor and shards": {"name": "hybrid", "tensor": 2, "shard": 2},
    "sequence": {"name": "hybrid", "tensor": 2, "shard": 2, "sequence_parallel": True},
    "context": {"name": "hybrid", "context": 2, "shard": 2},
    "expert": {"name": "hybrid", "shard": 4, "expert": 2},
    "pipeline": {"name": "hybrid", "pipeline": 2, "shard": 2, "micro_batches": 4},
    "zero 1": {"name": "deepspeed_stage_1", "reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000},
    "zero 2": {"name": "deepspeed_stage_2", "reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000},
    "zero 3": {"name": "deepspeed_stage_3", "reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000},
}


class Module(pl.LightningModule):
    """A small model, and its loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        build, _, self.loss_of = SMALL[name]
        self.model = build()

    def forward(self, *args: Any) -> Any:
        return self.model(*args)

    def training_step(self, batch: Any, _: int) -> Any:
        return self.loss_of(self.model, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def module_of(name: str) -> Any:
    """The model as a LightningModule."""
    if name == "example":
        return GPT(layers=4, width=256, heads=4, context=128)
    if name == "example mixture":
        return MixtureGPT(experts=4, layers=4, width=128, heads=4, context=128)
    return Module(name)


def batch_of(name: str, rows: int) -> Any:
    """A batch of random samples."""
    if name.startswith("example"):
        return torch.randint(256, (rows, 129))
    return SMALL[name][1](rows)


class Measured(pl.Callback):
    """Counts over one step."""

    def __init__(self, step: int) -> None:
        self.step, self.alive = step, AliveBytes()

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if args[-1] == self.step:
            self.alive.__enter__()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if args[-1] == self.step:
            self.alive.__exit__(None, None, None)


def measure(name: str, strategy: str, rows: int, precision: str, folder: str) -> int:
    """The peak of this rank, in bytes."""
    torch.manual_seed(0)
    before = bytes_now()  # of cases before this one: DeepSpeed leaves much
    module, chosen = module_of(name), STRATEGIES[strategy]
    if strategy.endswith("checkpointed"):
        chosen = {**chosen, "activation_checkpointing": [PARTS[name]]}
    batch = batch_of(name, rows)
    samples: Any = (
        [tuple(x[i] for x in batch) if isinstance(batch, tuple) else batch[i] for i in range(rows)] * 4 * dist_size()
    )
    loader: DataLoader[Any] = DataLoader(samples, batch_size=rows)
    counted = Measured(2)
    config = {
        "accelerator": "cpu",
        "devices": dist_size(),
        "strategy": chosen,
        "precision": precision,
        "max_steps": 3,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "loggers": [],
    }
    trainer = Trainer(
        TrainerConfig.model_validate(config),
        run=RunConfig(name=f"{name}-{strategy}".replace(" ", "-"), dir=folder),
        callbacks=[counted],
    )
    trainer.fit(module, loader)
    return counted.alive.peak - before


def dist_size() -> int:
    """How many ranks were started."""
    import os

    return int(os.environ.get("WORLD_SIZE", "1"))


def main() -> None:
    """Measures the cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--model", nargs="*", default=[*SMALL, "example", "example mixture"])
    parser.add_argument("--strategy", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--rows", type=int, default=8)
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for name in args.model:
        for strategy in args.strategy:
            try:
                peak = measure(name, strategy, args.rows, args.precision, str(args.json.parent / "runs"))
            except Exception as error:
                if not dist.is_initialized() or dist.get_rank() == 0:
                    print(name, strategy, repr(error)[:1500])
                continue
            peaks = [peak]
            if dist.is_initialized():
                peaks = [0] * dist.get_world_size()
                dist.all_gather_object(peaks, peak)
            if not dist.is_initialized() or dist.get_rank() == 0:
                found.append(
                    {
                        "model": name,
                        "strategy": strategy,
                        "rows": args.rows,
                        "precision": args.precision,
                        "ranks": peaks,
                    }
                )
                args.json.write_text(json.dumps(found))
                print(name, strategy, [round(x / 2**20, 2) for x in peaks], flush=True)


if __name__ == "__main__":
    main()
