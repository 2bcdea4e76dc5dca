"""Which samples are read: the same ones by several replicas or workers, or from data that differ on the ranks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final

import lightning.pytorch as L
import numpy as np
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from fairlead_lightning.verify.batches import digest, rows

_PROBED: Final = 4
"""Samples of a dataset that are compared between the ranks."""


def dataset_probe(trainer: L.Trainer) -> dict[str, Any] | None:
    """What this rank's dataset holds at some places; None where it does not say, or draws random numbers by itself.

    Returns:
        `name`, `length`, `samples` (their fingerprints), and whether a sampler splits the dataset between the ranks.
    """
    loader: Any = trainer.train_dataloader
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    splits = isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1
    if not splits or isinstance(
        sampler, DistributedSamplerWrapper
    ):  # a sampler of the user's says which keys there are
        return None
    dataset: Any = loader.dataset
    length = len(dataset)
    places = sorted({i * (length - 1) // (_PROBED - 1) for i in range(_PROBED)}) if length else []
    with _own_randomness():
        first, second = ([digest(_seeded(dataset, at)) for at in places] for _ in range(2))
    same = first == second
    return {"name": type(dataset).__name__, "length": length, "samples": first if same else None}


def _seeded(dataset: Any, at: int) -> Any:
    """Random transforms of the global generators give the same on all ranks."""
    torch.manual_seed(at)
    random.seed(at)
    np.random.seed(at)
    return dataset[at]


@contextmanager
def _own_randomness() -> Iterator[None]:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def other_datasets(probes: Sequence[dict[str, Any] | None], replicas: Sequence[int]) -> Iterator[str]:
    """A sampler gives each rank other places of one dataset: it has to be one."""
    first = probes[0]
    for rank, probe in enumerate(probes):
        if first is None or probe is None or replicas[rank] == replicas[0]:
            continue
        name = probe["name"]
        if probe["length"] != first["length"]:
            what = f"{probe['length']} samples on rank {rank} and {first['length']} on rank 0"
        elif probe["samples"] is not None and first["samples"] is not None and probe["samples"] != first["samples"]:
            what = f"other samples, or another order, on rank {rank} than on rank 0"
        else:
            continue
        yield (
            f"{name} has {what}, and a sampler splits it by position: samples are read twice or not at all; "
            "shuffle or cut it in the same way on all ranks, or set use_distributed_sampler: false for own parts"
        )
        return


def read_twice(batches: Sequence[Sequence[Any]], alone: Iterable[Any] | None, epoch_ends: bool) -> Iterator[str]:
    """Samples that several replicas or workers have read, which one process would have read once.

    Args:
        batches: Those of each replica.
        alone: The batches that one process reads; None where its loader cannot be asked.
        epoch_ends: Whether the batches are a whole epoch, at whose end samplers repeat samples to make ranks even.
    """
    own = [Counter(_fingerprints(one)) for one in batches]
    together = sum(own, Counter())
    twice = sum(count - 1 for count in together.values())
    allowed = len(batches) * (len(batches) - 1) if epoch_ends else 0
    if twice <= allowed:
        return
    total = sum(together.values())
    if alone is not None:
        single: Counter[str] = Counter(islice(_fingerprints(alone), total))
        if any(count > 1 for count in single.values()):
            # Data that repeat themselves: only whole batches, one behind the other, show that they are the same.
            same = len({tuple(digest(batch) for batch in one) for one in batches}) == 1
            steps = len({digest(batch) for batch in batches[0]})
            if not same or len(batches) == 1 or steps < 2:
                return
    between = sum((own[0] & other).total() for other in own[1:])
    if between:
        who = f"{len(batches)} replicas"
        fix = "a map-style dataset with a sampler, or split_dataset_by_node, or every n-th sample by global rank"
    else:
        who = "several workers"
        fix = "take every n-th sample by torch.utils.data.get_worker_info()"
    yield f"{who} read the same samples: {twice} of {total} in the compared steps are read more than once; {fix}"


def _fingerprints(batches: Iterable[Any]) -> Iterator[str]:
    for batch in batches:
        yield from (digest(row) for row in rows(batch))
