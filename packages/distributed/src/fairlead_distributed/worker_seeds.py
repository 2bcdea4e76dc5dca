"""Random augmentation in loader workers, made from (seed, epoch, index): the generators of a worker cannot be saved."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from fairlead_distributed import derive_seed


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
    """Stands before a dataset in the workers of a loader; each sample is drawn from a seed of its own.

    Everything else of the dataset is reached through it.  Code with generators of its own is not reached:
    `own_generators` finds them.

    Args:
        dataset: Indexed by the batches of an `Order`.
        seed: The same on all ranks.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.__dict__["_fairlead"] = (dataset, seed)

    def __getattr__(self, name: str) -> Any:
        if name == "_fairlead" or name.startswith("__"):  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._fairlead[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._fairlead[0], name, value)

    def __len__(self) -> int:
        return len(self._fairlead[0])

    def __getitem__(self, index: Any) -> Any:
        return self._fairlead[0][index]

    def __getitems__(self, batch: Sequence[Any]) -> Any:
        """The samples of a batch."""
        dataset, seed = self._fairlead
        epoch = getattr(batch, "epoch", None)
        at_once = getattr(dataset, "__getitems__", None)
        if epoch is None:
            return at_once(batch) if at_once else [dataset[index] for index in batch]
        if at_once:  # what a batch draws depends on the batch: exact with the same number of ranks
            _seed_globals(derive_seed(f"samples:{list(batch)!r}", seed, epoch))
            return at_once(list(batch))
        samples = []
        for index in batch:
            _seed_globals(_sample_seed(seed, epoch, index))
            samples.append(dataset[index])
        return samples


def _sample_seed(seed: int, epoch: int, index: Any) -> int:
    if isinstance(index, int):
        return derive_seed("sample", seed, epoch, index)
    return derive_seed(f"sample:{index!r}", seed, epoch)


def _seed_globals(seed: int) -> None:
    # By hand, on the CPU only: `torch.manual_seed` reaches for the GPU, which a forked worker must not touch.
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def own_generators(thing: Any) -> list[str]:
    """The generators that an object holds, as `rng` or `transform.rng`: no trainer knows their state.

    Looks three levels deep, into objects and lists.

    Example:
        >>> class Noisy:
        ...     def __init__(self):
        ...         self.rng = np.random.default_rng(0)
        >>> own_generators(Noisy())
        ['rng']
    """
    return sorted(set(_found(thing, "", 3)))


def _found(thing: Any, name: str, depth: int) -> Iterable[str]:
    for key, value in _parts(thing):
        place = f"{name}.{key}".lstrip(".")
        if isinstance(value, (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)):
            yield place
        elif depth > 1 and not isinstance(value, (str, bytes, int, float, torch.Tensor, np.ndarray, type)):
            yield from _found(value, place, depth - 1)


def _parts(thing: Any) -> list[tuple[str, Any]]:
    if isinstance(thing, (list, tuple)):
        return [(str(index), value) for index, value in enumerate(thing[:64])]
    if isinstance(thing, dict):
        return [(str(key), value) for key, value in list(thing.items())[:64]]
    return list(vars(thing).items()) if hasattr(thing, "__dict__") else []
