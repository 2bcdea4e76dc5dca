"""A loader over an order that can be continued: the same loader, whose batches come from elsewhere."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from fairlead_distributed.batch_order import Order
from fairlead_distributed.worker_seeds import SeededInWorkers


def default_sampler(sampler: Any, loader: DataLoader[Any]) -> dict[str, Any] | None:
    """Whether this is a sampler that DataLoader makes by itself, and how it shuffles."""
    if type(sampler) is SequentialSampler:
        return {"shuffle": False}
    if type(sampler) is not RandomSampler or sampler.replacement or sampler.num_samples != len(loader.dataset):  # type: ignore[arg-type]
        return None
    generator = sampler.generator
    return {"shuffle": True, **({"seed": generator.initial_seed()} if generator is not None else {})}


def over(loader: DataLoader[Any], order: Order, seed: int) -> DataLoader[Any]:
    """The same loader over an order; batches that are made ahead draw each sample from a seed of its own."""
    made = copy.copy(loader)
    made._iterator = None
    replaced: dict[str, Any] = {"batch_sampler": order, "sampler": order.sampler}
    if is_ahead(made):
        replaced["dataset"] = SeededInWorkers(loader.dataset, seed, loader.collate_fn)
    for name, value in replaced.items():
        object.__setattr__(made, name, value)  # DataLoader forbids it, for iterators that are under way
    made.generator = order.generator  # its own, so that an iterator draws nothing from the model's
    # Lightning warns of a loader that does not know its place; this one's is in each rank's part of a checkpoint.
    vars(made).update(state_dict=_elsewhere, load_state_dict=_elsewhere)
    return made


def is_ahead(loader: DataLoader[Any]) -> bool:
    """Whether samples are made before the training asks: by workers, or by Lightning where there is no length."""
    if loader.num_workers > 0:
        return True
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return True
    return False


def _elsewhere(state: object = None) -> dict[str, Any]:
    return {}


def order_of(loader: object) -> Order | None:
    """The order that a loader was put over."""
    batches = getattr(loader, "batch_sampler", None)
    return batches if isinstance(batches, Order) else None
