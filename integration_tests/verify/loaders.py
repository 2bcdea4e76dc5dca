"""Loaders as users write them for several ranks: right ones, and ones that leave out samples or read some twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

SIZE, BATCH = 96, 6


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _data(seed: int = 7) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(*(torch.randn(SIZE, size, generator=generator) for size in (6, 2)))


def _shuffled(seed: int) -> list[int]:
    order = list(range(SIZE))
    random.Random(seed).shuffle(order)
    return order


class Stream(IterableDataset[Any]):
    """Samples one after the other.

    Args:
        seed: Of their order.
        split: Takes every n-th by the rank.
        ranks: How many it counts; None: those that there are.
        position: Goes on behind the last sample that it has given.
    """

    def __init__(self, seed: int = 0, split: bool = True, ranks: int | None = None, position: bool = False) -> None:
        self.seed, self.split, self.ranks, self.position = seed, split, ranks, position
        self.at = 0

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        data = _data()
        every = iter(_shuffled(self.seed))
        own = islice(every, _rank(), None, self.ranks or _world()) if self.split else every
        start, self.at = (self.at, 0) if self.position else (0, 0)
        for number, place in enumerate(own):
            if number >= start:
                self.at = number + 1
                yield data[place]
        self.at = 0


class Augmented(Dataset[Any]):
    """Each sample is another one each time."""

    def __init__(self) -> None:
        self.data = _data()
        self.random = random.Random(_rank())

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, place: int) -> tuple[Tensor, ...]:
        x, y = self.data[place]
        return x + 0.1 * self.random.random(), y


class Drawn(Sampler[int]):
    """An order by a seed of its own; Lightning gives each rank its part of what its own one draws."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        self.random.shuffle(order)
        return iter(order)


class Part(Sampler[int]):
    """Splits by itself: every n-th of an order."""

    def __init__(self, seed: int, ranks: int | None = None) -> None:
        self.seed, self.ranks = seed, ranks

    def _own(self) -> list[int]:
        return _shuffled(self.seed)[_rank() :: self.ranks or _world()]

    def __len__(self) -> int:
        return len(self._own())

    def __iter__(self) -> Iterator[int]:
        return iter(self._own())


def _for_ranks(**arguments: Any) -> Any:
    """torch's own sampler, where there are ranks."""
    return DistributedSampler(_data(), **arguments) if dist.is_initialized() else None


def _weights() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0] * 48 + [3.0] * 48, SIZE)


LOADERS: dict[str, Callable[[], Any]] = {
    # Right ones.
    "shuffled": lambda: DataLoader(_data(), BATCH, shuffle=True),
    "last batch dropped": lambda: DataLoader(Subset(_data(), range(SIZE - 3)), BATCH, shuffle=True, drop_last=True),
    "one order": lambda: DataLoader(Subset(_data(), _shuffled(3)), BATCH),
    "sampler of torch": lambda: DataLoader(_data(), BATCH, sampler=_for_ranks(seed=4)),
    "own sampler": lambda: DataLoader(_data(), BATCH, sampler=Drawn(3)),
    "splits by itself": lambda: DataLoader(_data(), BATCH, sampler=Part(3)),
    "own part": lambda: DataLoader(Subset(_data(), _shuffled(3)[_rank() :: _world()]), BATCH, shuffle=True),
    "split stream": lambda: DataLoader(Stream(3), BATCH),
    # Right ones, of which it cannot be known.
    "weighted": lambda: DataLoader(_data(), BATCH, sampler=_weights()),
    "stream with a position": lambda: DataLoader(Stream(3, position=True), BATCH),
    "too many ranks": lambda: DataLoader(_data(), BATCH, sampler=Part(3, ranks=3)),
    "too many ranks in a stream": lambda: DataLoader(Stream(3, ranks=3), BATCH),
    "own part, augmented": lambda: DataLoader(Subset(Augmented(), range(_rank(), SIZE, _world())), BATCH),
    # Ranks that have an order each.
    "own order": lambda: DataLoader(Subset(_data(), _shuffled(3 + _rank())), BATCH),
    "own seed of torch's sampler": lambda: DataLoader(_data(), BATCH, sampler=_for_ranks(seed=_rank())),
    "own seed of a sampler": lambda: DataLoader(_data(), BATCH, sampler=Drawn(_rank())),
    "own seed, splits by itself": lambda: DataLoader(_data(), BATCH, sampler=Part(_rank())),
    "own seed of a part": lambda: DataLoader(Subset(_data(), _shuffled(_rank())[_rank() :: _world()]), BATCH),
    "own seed of a stream": lambda: DataLoader(Stream(_rank()), BATCH),
    # Parts that are too small, or everything.
    "too many ranks for torch": lambda: DataLoader(_data(), BATCH, sampler=_for_ranks(num_replicas=3, rank=_rank())),
    "same stream": lambda: DataLoader(Stream(3, split=False), BATCH),
    "same stream in another order": lambda: DataLoader(Stream(_rank(), split=False), BATCH),
}
SPLIT_BY_THEMSELVES = (
    "splits by itself",
    "own part",
    "own part, augmented",
    "own seed, splits by itself",
    "own seed of a part",
    "too many ranks",
)
"""For which a job says `use_distributed_sampler: false`."""


class Loaded(L.LightningDataModule):
    """One of these."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def train_dataloader(self) -> Any:
        return LOADERS[self.kind]()
