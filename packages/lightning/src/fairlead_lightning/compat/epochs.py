"""How many batches an epoch has, and where it ends."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as L
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher


def batches_of_epoch(trainer: L.Trainer) -> int | None:
    """This rank's batches in an epoch, once its loaders are made; None: nobody knows before they end."""
    fit: Any = trainer.fit_loop
    if has_none_left(fit._data_fetcher):
        return 0
    known = all(sized_len(one) is not None for one in fit._combined_loader.flattened)
    return int(fit.max_batches) if known and fit.max_batches != math.inf else None


def limit_epoch(trainer: L.Trainer, batches: int) -> None:
    """Ends each epoch after so many batches, its last validation too."""
    fit: Any = trainer.fit_loop
    fit.max_batches = batches
    interval, every = trainer.val_check_interval, vars(trainer)["val_check_batch"]
    if isinstance(interval, float) and every not in (None, math.inf):
        vars(trainer)["val_check_batch"] = max(1, int(batches * interval))


def is_last_batch(trainer: L.Trainer) -> bool:
    """Whether the batch that has begun is this rank's last one of the epoch; a stream is read one batch ahead."""
    loop: Any = trainer.fit_loop.epoch_loop
    return bool(loop._num_ready_batches_reached())


def end_epoch_here(trainer: L.Trainer) -> None:
    """Makes the batch that has begun the epoch's last one."""
    loop: Any = trainer.fit_loop.epoch_loop
    loop.batch_progress.is_last_batch = True


def has_none_left(data_fetcher: Any) -> bool:
    """Whether a stream, which is read ahead, has ended."""
    return isinstance(data_fetcher, _PrefetchDataFetcher) and bool(data_fetcher.done) and not data_fetcher.batches
