"""A loader's batches, so that an interrupted epoch leaves no trace in the random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar, cast

import lightning.fabric as lf
import torch
from lightning.fabric import is_wrapped
from torch.utils.data import DataLoader

from fairlead.errors import ConfigError
from fairlead_distributed import ResumableDistributedSampler, derive_seed, isolated_rng
from fairlead_lightning.custom_loop.state import LoopState

__all__ = ["batches_of"]

T = TypeVar("T")


def batches_of(loader: DataLoader[T], objects: LoopState, fabric: lf.Fabric, step: int) -> Iterator[T]:
    """The loader's batches from where the run stands to the end of the epoch, on this rank's device.

    Args:
        loader: The loader.
        objects: What the run saves; it must know where the loader is.
        fabric: Moves the batches.
        step: The run's step, for the seed of the workers.

    Raises:
        ConfigError: The run does not know where this loader is.
    """
    if is_wrapped(loader):
        raise ConfigError(
            "this loader was set up by Fabric",
            where="LoopRun.batches()",
            why="Fabric's wrapper counts the epochs from 0 at each start, and so loses the position",
            fix="give the DataLoader itself; its batches are moved to the device here",
        )
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, ResumableDistributedSampler) and any(sampler is one for one in objects.shared.values()):
        seed = derive_seed("loader", sampler.seed, sampler.epoch, sampler.consumed, step, fabric.global_rank)
        batches = sampler.batches(cast("DataLoader[T]", _Apart(loader, seed)))
    elif any(loader is one for one in objects.per_rank.values()):
        batches = iter(_Apart(loader, derive_seed("loader", torch.initial_seed(), step, fabric.global_rank)))
    else:
        raise ConfigError(
            "where this loader is cannot be saved",
            where="LoopRun.batches()",
            why="LoopRun was given neither its sampler, a ResumableDistributedSampler, nor itself as one of `per_rank`",
            fix="sampler = ResumableDistributedSampler(dataset); DataLoader(dataset, sampler=sampler, ...); "
            "LoopRun(..., sampler=sampler)",
        )
    return (cast("T", fabric.to_device(batch)) for batch in batches)


class _Apart:
    """A loader whose iterators take no number from the global generators; a seed gives them to its workers.

    An epoch that was interrupted makes one iterator more than an undisturbed one.
    """

    def __init__(self, loader: Any, seed: int) -> None:
        self._loader = loader
        self._seed = seed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        with isolated_rng(self._seed):
            return iter(self._loader)
