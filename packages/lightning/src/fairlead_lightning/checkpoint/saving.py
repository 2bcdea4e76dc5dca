"""One save of a Trainer, on all ranks together, whoever writes it: backend, strategy, or every rank its part."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.trainer.states import TrainerStatus

from fairlead.errors import ConfigError
from fairlead_distributed import derive_seed, isolated_rng
from fairlead_distributed.full_state import plain_name
from fairlead_distributed.run.commits import Commit, Commits, Hashes, Problem, raised_by
from fairlead_lightning import compat
from fairlead_runs.checkpoint_io import ShardedSaves

Correction = Callable[[dict[str, Any]], None]
"""Changes a checkpoint's counters of the loops; see `compat.between_epochs` and `compat.inside_epoch`."""


def write_state(
    trainer: L.Trainer, commits: Commits, weights_only: bool, correct: Correction | None, file: Path, commit: Commit
) -> Problem:
    """Writes the trainer's state to `state.ckpt` in a stage and has it committed; on all ranks together.

    Rank 0 gets why it failed, on whichever rank that was; it is not raised, because all ranks continue.
    """
    strategy = trainer.strategy
    with _profiled(trainer):
        # What hooks of a save draw is no part of the training: a run that resumes here has not drawn it.
        with isolated_rng(derive_seed("save", trainer.global_step, trainer.global_rank)):
            checkpoint = compat.dump_checkpoint(trainer, weights_only)
        if correct is not None:
            correct(checkpoint)
        shards = _sharded(trainer)
        if shards is not None:
            return raised_by(partial(_submit, trainer, shards, checkpoint, file, commit))

        def save() -> None:
            strategy.save_checkpoint(checkpoint, file)
            strategy.barrier("Trainer.save_checkpoint")

        return commits.through_strategy(file, save, commit)


def save_on_all_ranks(
    trainer: L.Trainer, path: str | os.PathLike[str], weights_only: bool | None, storage_options: Any
) -> bool:
    """Saves where the user wants it, through a backend that all ranks must call; False where there is none."""
    shards = _sharded(trainer)
    if shards is None:
        return False
    if storage_options is not None:
        raise ConfigError(
            "save_checkpoint got storage_options, but this backend has none",
            fix="leave storage_options out; settings are fields of `trainer.checkpoint_io`",
        )
    file = Path(trainer.strategy.broadcast(os.fspath(path)))
    with _profiled(trainer):
        _submit(trainer, shards, compat.dump_checkpoint(trainer, weights_only), file, lambda hashes: None)
    if trainer.state.status != TrainerStatus.RUNNING:
        shards.wait()  # nothing else would: what is saved in a fit is waited for where that ends
    return True


def meet(trainer: L.Trainer) -> None:
    """Has a backend that saves on all ranks connect them, before anything is saved."""
    shards = _sharded(trainer)
    if shards is not None:
        shards.meet()


def _profiled(trainer: L.Trainer) -> AbstractContextManager[None]:
    profiler: Profiler = vars(trainer)["profiler"]  # the class does not declare it
    return profiler.profile("save_checkpoint")


def _sharded(trainer: L.Trainer) -> ShardedSaves | None:
    io = trainer.strategy.checkpoint_io
    return io if isinstance(io, ShardedSaves) else None


def _submit(trainer: L.Trainer, shards: ShardedSaves, checkpoint: dict[str, Any], file: Path, commit: Commit) -> None:
    def then(hashes: Hashes) -> None:
        commit({f"{file.name}/{name}": digest for name, digest in hashes.items()})

    module = trainer.lightning_module
    shards.submit_shards(checkpoint, file, then, names=[_names(module, one) for one in trainer.optimizers])


def _names(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str | None]:
    """The names of an optimizer's parameters in the order of its groups; None for those of something else."""
    found = {}
    for name, parameter in module.named_parameters():
        found[id(parameter)] = plain_name(name)
    return [found.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]]
