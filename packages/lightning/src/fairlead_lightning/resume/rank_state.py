"""What each rank adds to a checkpoint: all that Lightning does not save and that the next step depends on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as L
import torch
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from fairlead.errors import CheckpointError
from fairlead_distributed import derive_seed, rng_state, set_rng_state
from fairlead_lightning import compat

__all__ = ["FORMAT", "capture", "rank_file", "read", "restore", "seed_anew"]

FORMAT: Final = 1


def rank_file(rank: int) -> str:
    """The name of the part of a checkpoint that one rank writes."""
    return f"rank-{rank:05d}.pt"


def read(folder: Path, rank: int) -> dict[str, Any] | None:
    """A rank's part of a checkpoint; None where it has none: it is plain Lightning's, or of fewer ranks.

    Raises:
        CheckpointError: It cannot be read, or a newer Fairlead has written it.
    """
    path = folder / rank_file(rank)
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip, OS: torch.load raises whatever it meets
        raise CheckpointError(
            "a rank's part of the checkpoint cannot be read",
            where=str(path),
            why=f"{type(error).__name__}: {error}",
            fix="name an older checkpoint with --resume",
        ) from error
    if not isinstance(state, dict) or not isinstance(state.get("format"), int):
        return None  # of a version that saved generators only
    if state["format"] > FORMAT:
        raise CheckpointError(
            "a newer version of Fairlead wrote this checkpoint",
            where=str(path),
            why=f"its format is {state['format']}, this version reads up to {FORMAT}",
            fix="upgrade fairlead",
        )
    return state


def capture(trainer: L.Trainer) -> dict[str, Any]:
    """This rank's state between two batches.

    Generators; running means and last metrics; states of torchmetrics; buffers, which each rank of data parallel
    training has its own of (batch norm); which modules are in evaluation mode, which parameters are frozen.
    """
    module = trainer.lightning_module
    return {
        "format": FORMAT,
        "world_size": trainer.world_size,
        "rng": rng_state(),
        "logged": compat.logged_state(trainer),
        "metrics": {name: _metric_state(metric) for name, metric in _metrics(module)},
        # Rank 0's buffers are in the checkpoint itself.
        "buffers": {name: buffer.detach() for name, buffer in _buffers(module)} if trainer.global_rank else {},
        "in_evaluation": [name for name, one in module.named_modules() if not one.training],
        "frozen": [name for name, parameter in module.named_parameters() if not parameter.requires_grad],
        "should_stop": trainer.should_stop,
    }


@torch.no_grad()
def restore(trainer: L.Trainer, state: Mapping[str, Any]) -> None:
    """Puts back what `capture` gave, generators last."""
    module = trainer.lightning_module
    compat.restore_logged(trainer, state["logged"])
    metrics = dict(_metrics(module))
    for name, saved in state["metrics"].items():
        if name in metrics:
            _set_metric_state(metrics[name], saved)
    buffers = dict(_buffers(module))
    for name, buffer in state["buffers"].items():
        if name in buffers and buffers[name].shape == buffer.shape:
            buffers[name].copy_(buffer)
    evaluated, frozen = set(state["in_evaluation"]), set(state["frozen"])
    for name, one in module.named_modules():
        one.training = name not in evaluated
    for name, parameter in module.named_parameters():
        if parameter.requires_grad is (name in frozen):
            parameter.requires_grad_(name not in frozen)
    trainer.should_stop = state["should_stop"]
    set_rng_state(state["rng"])


def seed_anew(seed: int, step: int, rank: int) -> None:
    """Seeds this rank's generators where there is no state of them: another number of ranks goes on."""
    import random

    import numpy as np

    number = derive_seed("rank", seed, step, rank)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def _metrics(module: L.LightningModule) -> Iterator[tuple[str, Metric]]:
    return ((name, one) for name, one in module.named_modules() if isinstance(one, Metric))


def _metric_state(metric: Metric) -> dict[str, Any]:
    values = {key: list(value) if isinstance(value, list) else value for key, value in metric.metric_state.items()}
    return {"values": values, "updates": metric.update_count}


def _set_metric_state(metric: Metric, saved: Mapping[str, Any]) -> None:
    for key, value in saved["values"].items():
        moved = [one.to(metric.device) for one in value] if isinstance(value, list) else value.to(metric.device)
        setattr(metric, key, moved)
    metric._update_count = saved["updates"]  # torchmetrics has no public way
    metric._computed = None


def _buffers(module: L.LightningModule) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a checkpoint holds; not those of metrics, which have their own place."""
    for prefix, one in module.named_modules():
        if isinstance(one, Metric):
            continue
        left_out: set[str] = getattr(one, "_non_persistent_buffers_set", set())
        for name, buffer in one.named_buffers(recurse=False):
            if name not in left_out and not isinstance(buffer, DTensor):
                yield f"{prefix}.{name}".lstrip("."), buffer
