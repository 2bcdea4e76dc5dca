"""How many batches an epoch has, and where it ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher


def batches_of_epoch(trainer: L.Trainer) -> int | None:
    """This rank's batches in an epoch, once its loaders are made; None: nobody knows before they end."""
    fit: Any = trainer.fit_loop
    if _has_none_left(fit._data_fetcher):
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


def watch_epochs(
    trainer: L.Trainer, loaders_made: Callable[[], None], begins: Callable[[bool], bool]
) -> Callable[[], None]:
    """Calls the one where the training's loaders were made, and the other where an epoch's first batch would be next.

    That one is told whether this rank has none, and answers whether the epoch is over. Returns what ends it.
    """
    fit: Any = trainer.fit_loop
    epoch: Any = trainer.fit_loop.epoch_loop
    ours: dict[Any, tuple[str, Any, Any]] = {}

    def setup_data() -> None:
        known = fit._combined_loader
        ours[fit][1]()
        if fit._combined_loader is not known:
            loaders_made()

    def on_run_start(data_fetcher: Any) -> None:
        ours[epoch][1](data_fetcher)
        if begins(_has_none_left(data_fetcher)):
            end_epoch_here(trainer)

    for loop, name, hook in ((fit, "setup_data", setup_data), (epoch, "on_run_start", on_run_start)):
        ours[loop] = name, getattr(loop, name), hook
        vars(loop)[name] = hook

    def undo() -> None:
        for loop, (name, before, hook) in ours.items():
            if vars(loop).get(name) is not hook:
                continue  # whoever came before has left already, and taken this along
            del vars(loop)[name]
            if getattr(loop, name) != before:
                vars(loop)[name] = before

    return undo


def _has_none_left(data_fetcher: Any) -> bool:
    """Whether a stream, which is read ahead, has ended."""
    return isinstance(data_fetcher, _PrefetchDataFetcher) and bool(data_fetcher.done) and not data_fetcher.batches
