"""Random augmentation in loader workers, made from (seed, epoch, index): the generators of a worker cannot be saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from fairlead_distributed import derive_seed
from fairlead_distributed.attributes import Attributes
from fairlead_distributed.plain_data import GENERATORS
from fairlead_distributed.rng import IsolatedGenerators, seed_cpu

_WITHOUT_PARTS: Final = (str, bytes, int, float, torch.Tensor, np.ndarray, type)


class EpochBatch(list[Any]):
    """The indices of a batch, which know their epoch also in a worker that lives longer than one."""

    epoch: int = 0

    @classmethod
    def of(cls, batch: Any, epoch: int) -> Any:
        """The batch with its epoch; one that is no list or tuple of indices stays as it is."""
        if not isinstance(batch, (list, tuple)):
            return batch
        marked = cls(batch)
        marked.epoch = epoch
        return marked


class SeededInWorkers(Dataset[Any]):
    """Stands before a dataset; each sample is drawn by global generators of its own seed.

    In the workers of a loader, and in the main process where batches are taken ahead of the training. It also sees
    whether the workers' copies of the dataset or of `further`, the loader's `collate_fn`, keep something.
    """

    def __init__(self, dataset: Any, seed: int, further: object = None) -> None:
        changed = torch.zeros(1, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self.__dict__["_fairlead"] = (dataset, seed)
        self.__dict__["_fairlead_watched"] = (changed, {"dataset": dataset, "collate_fn": further}, Attributes())

    @property
    def fairlead_changed(self) -> bool:
        """Whether the dataset or the `collate_fn` of a worker has changed an attribute of its own, which is lost."""
        return bool(self._fairlead_watched[0].item())

    def _look(self) -> None:
        changed, parts, kept = self._fairlead_watched
        if changed.item():
            return
        if not kept.watched:
            for name, part in parts.items():
                kept.watch(name, part)
        elif kept.state():
            changed.fill_(1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_fairlead", "__")):  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._fairlead[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._fairlead[0], name, value)

    def __len__(self) -> int:
        return len(self._fairlead[0])

    def __getitem__(self, index: Any) -> Any:
        return self._fairlead[0][index]

    def __getitems__(self, batch: Sequence[Any]) -> Any:
        dataset, seed = self._fairlead
        epoch = getattr(batch, "epoch", None)
        at_once = getattr(dataset, "__getitems__", None)
        if get_worker_info() is not None:
            self._look()
        if epoch is None:
            return at_once(batch) if at_once else [dataset[index] for index in batch]
        with IsolatedGenerators(0) if get_worker_info() is None else nullcontext():
            if at_once:  # what a batch draws depends on the batch: exact with the same number of ranks
                seed_cpu(derive_seed(f"samples:{list(batch)!r}", seed, epoch))
                return at_once(list(batch))
            samples = []
            for index in batch:
                numbers = (
                    ("sample", seed, epoch, index) if isinstance(index, int) else (f"sample:{index!r}", seed, epoch)
                )
                seed_cpu(derive_seed(*numbers))
                samples.append(dataset[index])
            return samples


def own_generators(thing: Any, depth: int = 3) -> dict[str, Any]:
    """The generators that an object holds within so many levels, by the shortest path to each, as `transform.rng`."""
    return dict(sorted((name, one) for name, one in held(thing, depth) if isinstance(one, GENERATORS)))


def held(thing: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """What an object holds in attributes and containers, the nearest first, each thing once."""
    seen, level = {id(thing)}, [("", thing)]
    for _ in range(depth):
        below = []
        for name, holder in level:
            for key, value in _parts(holder):
                if id(value) not in seen and not isinstance(value, _WITHOUT_PARTS):
                    seen.add(id(value))
                    below.append((f"{name}.{key}".lstrip("."), value))
        yield from below
        level = below


def _parts(thing: Any) -> list[tuple[str, Any]]:
    if isinstance(thing, (list, tuple)):
        return [(str(index), value) for index, value in enumerate(thing[:64])]
    if isinstance(thing, dict):
        return [(str(key), value) for key, value in list(thing.items())[:64]]
    return list(vars(thing).items()) if hasattr(thing, "__dict__") and not isinstance(thing, ModuleType) else []
