"""Loaders as people write them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torchdata import nodes  # type: ignore[import-untyped]
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from integration_tests.exact.jobs.data import Points

__all__ = ["WrittenData"]

SIZE, BATCH = 26, 4


class Augmented(Dataset[Any]):
    """It keeps a generator for its augmentation."""

    def __init__(self, points: Points) -> None:
        self.points = points
        self.random = random.Random(3)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        point, label = self.points[index]
        return point + 0.1 * self.random.random(), label


class Stream(IterableDataset[Any]):
    """A stream that knows where it is, as torchdata asks for."""

    def __init__(self, points: Points) -> None:
        self.points = points
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.at = self.at, 0
        for index in range(start, len(self.points)):
            self.at = index + 1
            yield self.points[index]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]


class Buffered(Stream):
    """It shuffles in a buffer that is not in its state, as Hugging Face's `shuffle` does."""

    def __iter__(self) -> Iterator[Any]:
        rng, buffer = random.Random(3), list[Any]()
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) > 5:
                yield buffer.pop(rng.randrange(len(buffer)))
        yield from buffer


class Sizeless(Sampler[int]):
    """A sampler without a length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size).tolist())


class Buckets(Sampler[list[int]]):
    """A batch sampler with a state of its own: which epoch, and how many batches of it."""

    def __init__(self, size: int, batch_size: int) -> None:
        self.size, self.batch_size = size, batch_size
        self.epoch = self.handed = 0

    def __len__(self) -> int:
        return -(-self.size // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for number in range(self.handed, len(self)):
            self.handed = number + 1
            yield order[number * self.batch_size : (number + 1) * self.batch_size]
        self.epoch, self.handed = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "handed": self.handed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.handed = state["epoch"], state["handed"]


class Replaying:
    """A `collate_fn` that mixes in what came before."""

    def __init__(self) -> None:
        self.last: Tensor | None = None

    def __call__(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        mixed = x if self.last is None else 0.9 * x + 0.1 * self.last
        self.last = x.mean(0)
        return mixed, y


def _rows(points: Points, shards: Sequence[Sequence[int]]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        for index in shard:
            point, label = points[index]
            yield {"x": point.tolist(), "y": int(label)}


def _doubled(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": [2 * value for value in row["x"]]}


def _doubled_batch(rows: dict[str, Any]) -> dict[str, Any]:
    return {"x": [[2 * value for value in row] for row in rows["x"]]}


def _of_rows(rows: list[dict[str, Any]]) -> Any:
    return torch.tensor([row["x"] for row in rows]), torch.tensor([row["y"] for row in rows])


class WrittenData(L.LightningDataModule):
    """One way to make loaders.

    Args:
        loader: Which.
        workers: Processes of the training's loader.
        persistent: Whether they outlive an epoch.
        batch_size: Of the shuffled loader; a batch-size finder sets it.
        reloaded: Whether each loader has other points than the one before.
    """

    def __init__(
        self,
        loader: str = "shuffled",
        workers: int = 0,
        persistent: bool = False,
        batch_size: int = BATCH,
        reloaded: bool = False,
    ) -> None:
        super().__init__()
        self.loader = loader
        self.reloaded = reloaded
        self.save_hyperparameters("batch_size")
        self.further: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent and workers > 0}

    def train_dataloader(self) -> Any:
        later = self.trainer.current_epoch if self.reloaded and self.trainer is not None else 0
        points = Points(SIZE, (6,), seed=1 + 100 * later, noise=0.1)
        made: Any = getattr(self, f"_{self.loader}")
        return made(points)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Points(10, (6,), seed=2), 4)

    def _shuffled(self, points: Points) -> Any:
        found: Any = self.hparams
        return DataLoader(points, found.batch_size, shuffle=True, **self.further)

    def _generator(self, points: Points) -> Any:
        return DataLoader(points, BATCH, shuffle=True, generator=torch.Generator().manual_seed(9), **self.further)

    def _weighted(self, points: Points) -> Any:
        return DataLoader(points, BATCH, sampler=WeightedRandomSampler([1.0] * 13 + [3.0] * 13, SIZE), **self.further)

    def _subset(self, points: Points) -> Any:
        return DataLoader(points, BATCH, sampler=SubsetRandomSampler(range(0, SIZE - 2, 2)), **self.further)

    def _sizeless(self, points: Points) -> Any:
        return DataLoader(points, BATCH, sampler=Sizeless(SIZE), **self.further)

    def _buckets(self, points: Points) -> Any:
        return DataLoader(points, batch_sampler=Buckets(SIZE, BATCH), **self.further)

    def _augmented(self, points: Points) -> Any:
        return DataLoader(Augmented(points), BATCH, shuffle=True, **self.further)

    def _collating(self, points: Points) -> Any:
        return DataLoader(points, BATCH, shuffle=True, collate_fn=Replaying(), **self.further)

    def _stateful(self, points: Points) -> Any:
        return StatefulDataLoader(points, BATCH, shuffle=True, **self.further)

    def _stateful_generator(self, points: Points) -> Any:
        return StatefulDataLoader(
            points, BATCH, shuffle=True, generator=torch.Generator().manual_seed(9), **self.further
        )

    def _stream(self, points: Points) -> Any:
        return StatefulDataLoader(Stream(points), BATCH, **self.further)

    def _stream_buffered(self, points: Points) -> Any:
        return StatefulDataLoader(Buffered(points), BATCH, **self.further)

    def _nodes(self, points: Points) -> Any:
        order = nodes.SamplerWrapper(RandomSampler(points, generator=torch.Generator().manual_seed(9)))
        samples = nodes.Batcher(nodes.Mapper(order, points.__getitem__), BATCH, drop_last=False)
        return nodes.Loader(nodes.Mapper(samples, default_collate))

    def _hf(self, points: Points) -> Any:
        return self._hugging_face(points, lambda rows: rows)

    def _hf_map(self, points: Points) -> Any:
        return self._hugging_face(points, lambda rows: rows.map(_doubled))

    def _hf_batched(self, points: Points) -> Any:
        return self._hugging_face(points, lambda rows: rows.map(_doubled_batch, batched=True, batch_size=5))

    def _hf_shuffled(self, points: Points) -> Any:
        return self._hugging_face(points, lambda rows: rows.shuffle(seed=3, buffer_size=8))

    def _hugging_face(self, points: Points, prepare: Callable[[Any], Any]) -> Any:
        import datasets  # type: ignore[import-not-found]  # not among what CI installs

        halves = {"shards": [range(0, SIZE, 2), range(1, SIZE, 2)]}
        rows = prepare(datasets.IterableDataset.from_generator(partial(_rows, points), gen_kwargs=halves))
        return StatefulDataLoader(rows, BATCH, collate_fn=_of_rows, **self.further)

    def _plain_stream(self, points: Points) -> Any:
        return DataLoader(Stream(points), BATCH, **self.further)

    def _max_size(self, points: Points) -> Any:
        return self._combined(points, "max_size")

    def _max_size_cycle(self, points: Points) -> Any:
        return self._combined(points, "max_size_cycle")

    def _min_size(self, points: Points) -> Any:
        return self._combined(points, "min_size")

    def _combined(self, points: Points, mode: Any) -> Any:
        short = DataLoader(Points(10, (6,), seed=3), BATCH, shuffle=True)
        return CombinedLoader({"long": self._shuffled(points), "short": short}, mode)
