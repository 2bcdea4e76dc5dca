"""Small data with everything in it that makes a resume hard."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from fairlead_distributed import ResumableDistributedSampler
from integration_tests.exact.jobs.probe import pauses

__all__ = ["Points", "PointsData", "StatefulLoader", "Strided", "note"]

CLASSES = 4


class Points(Dataset[tuple[Tensor, int]]):
    """Points around the centres of some classes; `noise` draws an augmentation from all three global generators.

    Args:
        size: How many.
        shape: Of one point.
        seed: Of the points.
        noise: The size of the augmentation.
    """

    def __init__(self, size: int, shape: tuple[int, ...], seed: int, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        centres = torch.randn(CLASSES, *shape, generator=torch.Generator().manual_seed(0))
        self.labels = torch.randint(CLASSES, (size,), generator=generator)
        self.points = centres[self.labels] + 1.5 * torch.randn(size, *shape, generator=generator)
        self.noise = noise
        self.pause = pauses().get("sample", 0.0)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.pause:
            time.sleep(self.pause)
        point = self.points[index]
        if self.noise:
            shift = self.noise * (random.random() + float(np.random.rand()))
            point = point + shift + self.noise * torch.randn_like(point)
        return point, int(self.labels[index])


class Strided(Sampler[int]):
    """A user's own sampler: in a fixed order of its own, without a state."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter([i for start in range(3) for i in range(start, self.size, 3)])


class StatefulLoader(DataLoader[Any]):
    """A loader with a state, as torchdata's StatefulDataLoader has one: `handed` batches of an `epoch`."""

    def __init__(self, dataset: Dataset[Any], batch_size: int) -> None:
        super().__init__(dataset, batch_size)
        self._epoch = 0
        self._handed = 0
        self._skip = 0

    def __iter__(self) -> Any:
        skip, self._skip = self._skip, 0
        super().__iter__()  # it takes a seed for workers from the global generator, as every loader does
        return self._batches(skip)

    def _batches(self, skip: int) -> Iterator[Any]:
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(self._epoch)).tolist()
        self._handed = skip
        size: int = self.batch_size or 1
        for number in order[skip:]:
            indices = range(number * size, min((number + 1) * size, len(self.dataset)))  # type: ignore[arg-type]
            batch = self.collate_fn([self.dataset[index] for index in indices])
            self._handed += 1
            if self._handed == len(order):  # nothing will ask for more than the last one
                self._epoch, self._handed = self._epoch + 1, 0
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "handed": self._handed}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._epoch, self._skip = state_dict["epoch"], state_dict["handed"]
        self._handed = self._skip


class PointsData(L.LightningDataModule):
    """Loaders over `Points`: neither divides by the number of ranks.

    Args:
        batches: Training batches a rank and epoch; the last one is not full.
        val_batches: Validation batches of rank 0; the other ranks have less to do.
        batch_size: Points of a batch and rank.
        shape: Of one point.
        workers: Processes of each loader.
        noise: The size of the random augmentation of training points.
        shuffle: Whether the training points are shuffled.
        kind: `default`, or a sampler of the user's (`strided`: without a state, `resumable`: Fairlead's own), or
            `stateful`: a loader with a state.
    """

    def __init__(
        self,
        batches: int = 8,
        val_batches: int = 3,
        batch_size: int = 4,
        shape: tuple[int, ...] = (8,),
        workers: int = 0,
        noise: float = 0.0,
        shuffle: bool = True,
        kind: str = "default",
    ) -> None:
        super().__init__()
        self.batches, self.val_batches, self.batch_size = batches, val_batches, batch_size
        self.shape, self.workers, self.noise = tuple(shape), workers, noise
        self.shuffle, self.kind = shuffle, kind

    def train_dataloader(self) -> Any:
        ranks = self._ranks()
        points = Points(self.batches * self.batch_size * ranks - ranks - 1, self.shape, seed=1, noise=self.noise)
        if self.kind == "stateful":
            return StatefulLoader(points, self.batch_size)
        further: dict[str, Any] = {"shuffle": self.shuffle}
        if self.kind == "strided":
            further = {"sampler": Strided(len(points))}
        elif self.kind == "resumable":
            further = {"sampler": ResumableDistributedSampler(points, seed=3)}
        return DataLoader(points, self.batch_size, num_workers=self.workers, **further)

    def val_dataloader(self) -> DataLoader[Any]:
        ranks = self._ranks()
        # One point more than full batches on all ranks: rank 0 alone would have a batch of one more.
        size = (self.val_batches - 1) * self.batch_size * ranks + 1
        return DataLoader(Points(size, self.shape, seed=2), self.batch_size, num_workers=self.workers)

    def _ranks(self) -> int:
        fixed = os.environ.get("EXACT_SIZED_FOR")  # the data of another number of ranks, to compare with it
        if fixed is not None:
            return int(fixed)
        return int(self.trainer.world_size) if self.trainer is not None else 1


def note(name: str, **values: Any) -> None:
    """Adds a line to a file beside the run, for what a test wants to know of a step."""
    with open(name, "a") as file:
        file.write(json.dumps(values) + "\n")
