"""A loader's batches, so that an interrupted epoch leaves no trace in the random numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import lightning.fabric as lf
import torch
from lightning.fabric import is_wrapped
from torch.utils.data import DataLoader

from fairlead.errors import ConfigError
from fairlead_distributed import ResumableDistributedSampler, derive_seed, isolated_rng
from fairlead_lightning.custom_loop.state import LoopState
from fairlead_lightning.resume.rank_state import data_rank

T = TypeVar("T")


class LoopBatches:
    """The batches of a loop, from loaders whose position is in what the run saves (`objects`)."""

    def __init__(self, objects: LoopState, fabric: lf.Fabric) -> None:
        self._objects = objects
        self._fabric = fabric
        self._drawn = False
        self._positions: list[tuple[int, int]] = []

    def begin(self) -> None:
        """The run is restored: from here on it is seen whether the loop takes its batches from elsewhere."""
        self._positions = self._sampled()

    def of(self, loader: DataLoader[T], step: int) -> Iterator[T]:
        """See `LoopRun.batches`; the run's step is for the seed of the workers."""
        if is_wrapped(loader):
            raise ConfigError(
                "this loader was set up by Fabric",
                where="LoopRun.batches()",
                why="Fabric's wrapper counts the epochs from 0 at each start, and so loses the position",
                fix="give the DataLoader itself; its batches are moved to the device here",
            )
        sampler: Any = getattr(loader, "sampler", None)
        rank = data_rank(self._fabric)
        if any(sampler is one for one in self._samplers()):
            seed = derive_seed("loader", sampler.seed, sampler.epoch, sampler.consumed, step, rank)
            batches = sampler.batches(cast("DataLoader[T]", _Apart(loader, seed)))
        elif any(loader is one for one in self._objects.per_rank.values()):
            batches = iter(_Apart(loader, derive_seed("loader", torch.initial_seed(), step, rank)))
        else:
            raise ConfigError(
                "where this loader is cannot be saved",
                where="LoopRun.batches()",
                why="LoopRun was given neither its sampler, a ResumableDistributedSampler, nor itself in `per_rank`",
                fix="sampler = ResumableDistributedSampler(dataset); DataLoader(dataset, sampler=sampler, ...); "
                "LoopRun(..., sampler=sampler)",
            )
        self._drawn = True
        return (cast("T", self._fabric.to_device(batch)) for batch in batches)

    def warn_of_others(self) -> None:
        """Warns once where the samplers have moved and the batches were not taken here."""
        if self._drawn or self._sampled() == self._positions:
            return
        self._drawn = True
        warnings.warn(
            "the batches do not come from LoopRun.batches(): a run that is interrupted within an epoch may go on "
            "with other random numbers than an undisturbed one",
            stacklevel=3,
        )

    def _sampled(self) -> list[tuple[int, int]]:
        return [(one.epoch, one.consumed) for one in self._samplers()]

    def _samplers(self) -> list[ResumableDistributedSampler]:
        return [one for one in self._objects.shared.values() if isinstance(one, ResumableDistributedSampler)]


class _Apart:
    """A loader whose iterators take no random number: an interrupted epoch makes one more than an undisturbed one."""

    def __init__(self, loader: Any, seed: int) -> None:
        self._loader = loader
        self._seed = seed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        with isolated_rng(self._seed):
            return iter(self._loader)
