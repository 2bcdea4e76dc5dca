"""Workers of a loader: they outlive the signals that ask a run to stop, and their random augmentation is made from
(seed, epoch, index), for the generators of a worker cannot be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from fairlead_distributed import derive_seed
from fairlead_distributed.object_fingerprint import fingerprint
from fairlead_distributed.rng import IsolatedGenerators, seed_cpu


def protect_workers(loader: object, outlive: Any) -> None:
    """Has each worker of a DataLoader outlive the signals; without it the run would die with them.

    `outlive` is what a guard has as `in_worker`.
    """
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return
    init: Any = loader.worker_init_fn
    ours = isinstance(init, partial) and init.func is _in_worker  # of an earlier start
    loader.worker_init_fn = partial(_in_worker, outlive, init.args[1] if ours else init)
    # Not by the loader itself: persistent workers in a cycle end only when garbage is collected, seconds later each.
    vars(loader)["_get_iterator"] = partial(_start_workers, ref(loader), outlive)


def _start_workers(of: ref[DataLoader[Any]], outlive: Any) -> Any:
    """Replaces a loader's `_get_iterator`: torch has no public hook around the start of its workers."""
    loader = of()
    assert loader is not None
    with outlive.held():
        return type(loader)._get_iterator(loader)


def _in_worker(outlive: Any, users: Callable[[int], None] | None, worker: int) -> None:
    outlive(worker)
    if users is not None:
        users(worker)


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
    """Wraps a dataset and seeds the global generators for each sample.

    In the workers of a loader, and in the main process where batches are taken ahead of the training. It also sees
    whether the workers' copies of the dataset or of `further`, the loader's `collate_fn`, keep something.
    """

    def __init__(self, dataset: Any, seed: int, further: object = None) -> None:
        changed = torch.zeros(1, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self.__dict__["_fairlead"] = (dataset, seed)
        self.__dict__["_fairlead_watched"] = (changed, (dataset, further), {"batches": 0, "mark": None})

    @property
    def fairlead_changed(self) -> bool:
        """Whether the dataset or the `collate_fn` of a worker has changed an attribute, which is lost."""
        return bool(self._fairlead_watched[0].item())

    def _look(self) -> None:
        """In a worker, behind a batch: the first one may open files; then behind more and more of them."""
        changed, parts, seen = self._fairlead_watched
        seen["batches"] += 1
        if seen["batches"] == 1:
            seen["mark"] = fingerprint(parts, {})
        elif seen["batches"].bit_count() == 1 and fingerprint(parts, {}) != seen["mark"]:
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
        samples = self._samples(batch)
        if get_worker_info() is not None:
            self._look()
        return samples

    def _samples(self, batch: Sequence[Any]) -> Any:
        dataset, seed = self._fairlead
        epoch = getattr(batch, "epoch", None)
        at_once = getattr(dataset, "__getitems__", None)
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
