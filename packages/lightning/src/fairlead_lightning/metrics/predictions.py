"""Where `predict` puts what each rank predicted."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter

from fairlead.errors import FairleadError, RunDirectoryError
from fairlead_distributed.objects import broadcast_object


class PredictionFiles(BasePredictionWriter):
    """Writes `rank-00000.pt`: what this rank's `predict_step` returned, and which samples of the data these are.

    The folder is that of `--output`, new or empty, else the next `predictions-1`, `-2`, ... in the run directory.
    """

    def __init__(self, run: Path, asked: Path | None = None) -> None:
        super().__init__("epoch")
        self.run = run
        self.asked = asked
        if asked is not None:
            _require_empty(asked)  # before the hours that a prediction may take

    def write_on_epoch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """One file a rank; it appears under its name when it is complete."""
        folder = self._folder(trainer)
        target = folder / f"rank-{trainer.global_rank:05d}.pt"
        part = target.with_suffix(".part")
        torch.save({"predictions": list(predictions), "indices": list(batch_indices)}, part)
        os.replace(part, target)
        trainer.strategy.barrier("fairlead.predictions")
        if trainer.is_global_zero:
            files = f"{trainer.world_size} file{'s'[: trainer.world_size > 1]}"
            print(f"predictions  {folder} ({files}, one a rank)", flush=True)

    def _folder(self, trainer: L.Trainer) -> Path:
        """The same for all ranks: one of them makes it, and an error on it is raised on all."""
        decided: Path | FairleadError = self.run
        if trainer.is_global_zero:
            try:
                decided = _made(self.run, self.asked)
            except FairleadError as error:
                decided = error
        decided = broadcast_object(decided)
        if isinstance(decided, FairleadError):
            raise decided
        return decided


def _made(run: Path, asked: Path | None) -> Path:
    for number in itertools.count(1):
        folder = asked or run / f"predictions-{number}"
        try:
            folder.mkdir(parents=True, exist_ok=asked is not None)
        except OSError as error:
            if isinstance(error, FileExistsError) and asked is None and run.is_dir():
                continue
            raise _not_made(folder, error) from error
        return folder
    raise AssertionError("unreachable")


def _require_empty(folder: Path) -> None:
    try:
        holds = sorted(os.listdir(folder))
    except FileNotFoundError:
        return
    except OSError as error:
        raise _not_made(folder, error) from error
    if holds:
        raise RunDirectoryError(
            "the folder for the predictions is not empty",
            where=f"--output {folder}",
            why=f"it holds {', '.join(holds[:5])}{', ...' if len(holds) > 5 else ''}",
            fix="name a new folder",
        )


def _not_made(folder: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        "cannot make the folder for the predictions",
        where=str(folder),
        why=error.strerror,
        fix="name another one with --output",
    )
