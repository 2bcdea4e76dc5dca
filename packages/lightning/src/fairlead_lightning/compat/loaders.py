"""The loaders that a fit and an evaluation draw from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as L
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import _update_dataloader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler


def take_sharding(trainer: L.Trainer) -> tuple[bool, Callable[[], None]]:
    """Has Lightning leave samplers as they are; returns whether it would have sharded them, and what ends it."""
    connector: Any = trainer._accelerator_connector
    before, connector.use_distributed_sampler = connector.use_distributed_sampler, False
    return before and connector.is_distributed, lambda: setattr(connector, "use_distributed_sampler", before)


def sharded(loader: DataLoader[Any], shuffle: bool, seed: int, shards: Mapping[str, int]) -> DataLoader[Any]:
    """The loader made anew for one rank's part of what it draws, as Lightning does it."""
    known = isinstance(loader.sampler, (RandomSampler, SequentialSampler))
    arguments: dict[str, Any] = {"shuffle": shuffle, "seed": seed, **shards}
    part: Any = (
        DistributedSampler(loader.dataset, **arguments)
        if known
        else DistributedSamplerWrapper(loader.sampler, **arguments)
    )
    return _update_dataloader(loader, part)


def take_prediction_loaders(trainer: L.Trainer, prepare: Callable[[Any], Any]) -> Callable[[], None]:
    """Has `prepare` make the loaders of a prediction ready, instead of Lightning; returns what ends it.

    Lightning makes the user's sampler and loader anew, with arguments that it guesses.
    """
    connector: Any = trainer._data_connector
    connector._prepare_dataloader = lambda dataloader, shuffle, mode: prepare(dataloader)
    return lambda: vars(connector).pop("_prepare_dataloader", None)


def evaluation_loaders(trainer: L.Trainer) -> list[Any]:
    """The loaders of an evaluation, one after the other; none where the number of a batch is not known before."""
    loops = {"fit": trainer.fit_loop.epoch_loop.val_loop, "validate": trainer.validate_loop, "test": trainer.test_loop}
    module, testing = trainer.lightning_module, trainer.testing
    step = module.test_step if testing else module.validation_step
    in_turn = loops[str(trainer.state.fn.value)]._is_sequential  # type: ignore[union-attr]
    if not in_turn or is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
        return []
    return list(CombinedLoader(trainer.test_dataloaders if testing else trainer.val_dataloaders).flattened)


def ends_with_longest(trainer: L.Trainer) -> bool:
    """Whether the shorter of several training loaders give nothing once they are through (`max_size`)."""
    combined: Any = trainer.fit_loop._combined_loader
    return combined is not None and combined._mode == "max_size"
