"""The loaders that a fit and an evaluation draw from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from torch.utils.data import DataLoader

__all__ = ["evaluation_loaders", "prepare_loaders_with", "train_loaders", "wants_sharding"]


def prepare_loaders_with(
    trainer: L.Trainer, prepare: Callable[[object, bool, str, Callable[[], object]], object]
) -> Callable[[], None]:
    """Has `prepare(loader, shuffle, stage, lightnings)` make each loader ready; `lightnings()` is Lightning's way.

    `stage` is `train`, `validate`, `sanity_check`, `test` or `predict`.

    Returns:
        Ends it.
    """
    connector: Any = trainer._data_connector
    original = connector._prepare_dataloader

    def prepare_dataloader(dataloader: object, shuffle: bool, mode: Any) -> object:
        return prepare(dataloader, shuffle, mode.value, lambda: original(dataloader, shuffle=shuffle, mode=mode))

    connector._prepare_dataloader = prepare_dataloader

    def undo() -> None:
        vars(connector).pop("_prepare_dataloader", None)

    return undo


def wants_sharding(trainer: L.Trainer, loader: DataLoader[Any]) -> bool:
    """Whether each rank is to get its own part of a loader that does not see to it itself."""
    private: Any = trainer._data_connector
    return bool(private._requires_distributed_sampler(loader))


def train_loaders(trainer: L.Trainer) -> list[Any]:
    """The loaders that the fit draws from, as they were made ready; empty before that."""
    loop: Any = trainer.fit_loop
    return list(loop._combined_loader.flattened) if loop._combined_loader is not None else []


def evaluation_loaders(trainer: L.Trainer) -> list[Any]:
    """The loaders that the evaluation goes through one after the other; empty where its steps take several at once.

    Also where they draw batches by themselves (`dataloader_iter`): the number of a batch is not known before.
    """
    loop: Any = trainer._active_loop
    if loop._combined_loader._mode != "sequential" or isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
        return []
    return list(loop._combined_loader.flattened)
