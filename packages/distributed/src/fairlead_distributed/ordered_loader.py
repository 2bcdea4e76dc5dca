"""A loader over an order that can be continued: the same loader, whose batches come from elsewhere; and why not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fairlead.findings import Inexact
from fairlead_distributed.attributes import Attributes, Restores
from fairlead_distributed.batch_order import Order, ReplayedOrder, ShardedOrder
from fairlead_distributed.loader_workers import SeededInWorkers
from fairlead_distributed.objects import broadcast_object
from fairlead_distributed.plain_data import is_stateful
from fairlead_distributed.sampler import ResumableDistributedSampler

# They depend on nothing but their generator, the epoch, and `weights` and `indices`.
_KNOWN: Final = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


@dataclass(frozen=True)
class Replicas:
    """Which ranks take different batches: how many of them there are, and which this rank is."""

    count: int
    rank: int


def sharded_order(
    loader: DataLoader[Any], replicas: Callable[[], Replicas], seed: int, **arguments: Any
) -> ShardedOrder | None:
    """The order of a loader with one of torch's default samplers, divided over the ranks; None of any other.

    A collective where it is one of these. A `ResumableDistributedSampler` or `DistributedSampler` of the user's says
    itself how the ranks share the data.
    """
    batches: Any = loader.batch_sampler
    sampler: Any = getattr(batches, "sampler", None)
    if type(batches) is not BatchSampler:
        return None
    if type(sampler) is ResumableDistributedSampler:
        return ShardedOrder(batches, seed=sampler.seed, **arguments)
    if type(sampler) is DistributedSampler:
        shares, shuffle, drop_last = Replicas(sampler.num_replicas, sampler.rank), sampler.shuffle, sampler.drop_last
        seed = sampler.seed
    elif (shuffles := _shuffles(sampler, loader)) is not None:
        shares, shuffle, drop_last = replicas(), shuffles, False
        generator = sampler.generator if shuffle else None
        seed = generator.initial_seed() if generator is not None else seed
    else:
        return None
    seed = broadcast_object(seed)  # that of a generator, which ranks have seeded apart
    parts = ResumableDistributedSampler(loader.dataset, shares.count, shares.rank, shuffle, seed, drop_last)
    return ShardedOrder(BatchSampler(parts, batches.batch_size, batches.drop_last), seed=seed, **arguments)


def _shuffles(sampler: Any, loader: DataLoader[Any]) -> bool | None:
    """Whether a sampler that DataLoader makes by itself shuffles; None: it is another one."""
    if type(sampler) is SequentialSampler:
        return False
    length: int = len(loader.dataset)  # type: ignore[arg-type]
    by_itself = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == length
    return True if by_itself else None


def sampler_of(loader: DataLoader[Any]) -> Any:
    """What decides about the batches: the sampler, or a batch sampler that is more than torch's around it."""
    return loader.sampler if type(loader.batch_sampler) is BatchSampler else loader.batch_sampler


def set_in_training(sampler: Any) -> frozenset[str] | None:
    """The attributes of a sampler that a training may set; None: all of them, it is none of torch's."""
    return frozenset({"weights", "indices"}) if type(sampler) in _KNOWN else None


def replayed_order(loader: DataLoader[Any], **arguments: Any) -> ReplayedOrder:
    """The order of any other loader over an indexed dataset."""
    batches: Any = loader.batch_sampler
    return ReplayedOrder(batches, next(filter(is_stateful, (batches, loader.sampler)), None), **arguments)


def over(loader: DataLoader[Any], order: Order, seed: int) -> DataLoader[Any]:
    """The same loader over an order; batches that are made ahead seed the generators for each sample."""
    made = copy.copy(loader)
    made._iterator = None
    replaced: dict[str, Any] = {"batch_sampler": order, "sampler": order.sampler}
    if is_ahead(made):
        replaced["dataset"] = SeededInWorkers(loader.dataset, seed, loader.collate_fn)
    for name, value in replaced.items():
        object.__setattr__(made, name, value)  # DataLoader forbids it, for iterators that are under way
    made.generator = order.generator  # its own, so that an iterator draws nothing from the model's
    # Lightning warns of a loader that cannot save its position; this one's is in each rank's part of a checkpoint.
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


def is_ordered(loader: object) -> bool:
    """Whether it makes batches of a dataset by index: its position can be counted and restored."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def loader_batch_size(loader: object) -> int | None:
    """The samples of a loader's batches; None: it does not say that."""
    sizes = (getattr(one, "batch_size", None) for one in (loader, getattr(loader, "batch_sampler", None)))
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def watch_loader(attributes: Attributes, name: str, loader: object, restores: Restores = lambda *_: True) -> None:
    """Watches what a loader's dataset and `collate_fn` keep in this process.

    Of one with a state: its generator, and a dataset that can be indexed. `restores`: what of the dataset.
    """
    stateful = is_stateful(loader)
    if stateful:
        attributes.watch(name, SimpleNamespace(generator=getattr(loader, "generator", None)))
    if not isinstance(loader, DataLoader):
        return
    collate = getattr(loader.collate_fn, "__self__", loader.collate_fn)
    if not is_stateful(loader.dataset) and not (stateful and isinstance(loader.dataset, IterableDataset)):
        attributes.watch(f"{name} dataset", loader.dataset, restores=restores)
    if not is_stateful(collate):
        attributes.watch(f"{name} collate_fn", SimpleNamespace(collate_fn=collate))


def unsaved_changes(loader: object) -> Iterator[Inexact]:
    """What the training has changed in a loader that is put over an order, and a resume does not repeat."""
    dataset, order = getattr(loader, "dataset", None), order_of(loader)
    if isinstance(dataset, SeededInWorkers) and dataset.fairlead_changed:
        yield Inexact(
            "what a loader's workers keep in attributes",
            why="the dataset or collate_fn of each worker changes its own copy, which is in no checkpoint",
            fix="num_workers: 0, or a dataset and collate_fn that keep nothing between two samples",
            certain=False,
        )
    if order is not None and order.changed:
        yield Inexact(
            "a dataset or sampler that has changed within an epoch",
            why="a resumed epoch begins with what it is at the stop, and so do its workers' copies",
            fix="change it where an epoch begins (on_train_epoch_start), with workers that are not persistent",
            certain=False,
        )


def begins_anew(loader: Any) -> Inexact:
    """Why a loader has no position to resume from."""
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset):
        return Inexact(
            f"the IterableDataset {type(dataset).__name__}",
            why="a stream has no position to resume from: its epoch begins anew",
            fix="torchdata's StatefulDataLoader with state_dict and load_state_dict in the dataset, or a dataset with "
            "__getitem__ and __len__",
        )
    if not isinstance(loader, DataLoader):
        what, fix = f"the loader {type(loader).__name__}", "a torch.utils.data.DataLoader"
    elif loader.batch_sampler is None:
        what, fix = "a loader with batch_size=None", "let the loader make batches"
    else:
        what, fix = f"the {type(sampler_of(loader)).__name__} of a loader", "ResumableDistributedSampler"
    why = "it has no position that could be saved: its epoch begins anew"
    return Inexact(what, why=why, fix=f"{fix}, or a loader with state_dict and load_state_dict")


def may_differ(loader: Any) -> Iterator[Inexact]:
    """Reasons why the batches of a loader with a position may differ after a resume."""
    if is_stateful(loader):
        yield from _trusted(loader)
        return
    own, name = sampler_of(loader), type(loader).__name__
    kind = "sampler" if own is loader.sampler else "batch sampler"
    if type(own) not in _KNOWN and not is_stateful(own) and not is_stateful(loader.sampler):
        yield Inexact(
            f"the {kind} {type(own).__name__}",
            why="it has no state_dict; its batches are redrawn from a seed of the epoch, "
            "which is exact only if they depend on nothing but that",
            fix="give it state_dict and load_state_dict, or use ResumableDistributedSampler",
            certain=False,
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        yield Inexact(
            f"the __iter__ of {name}",
            why="what it adds to that of DataLoader is unknown",
            fix="give the loader state_dict and load_state_dict, or do it in the dataset or the sampler",
        )
    if not loader.in_order and loader.num_workers:
        yield Inexact(
            "a training loader with in_order=False",
            why="the workers decide by their speed which batch comes next",
            fix="leave in_order out",
        )


def _trusted(loader: Any) -> Iterator[Inexact]:
    """Reasons why a loader with a `state_dict` may resume differently, which only `--prove-resume` can tell."""
    if getattr(loader, "num_workers", 0):
        yield Inexact(
            f"the workers of a {type(loader).__name__}",
            why="their random generators are not in its state; without random samples it is exact",
            fix="draw from sample_rng(seed, epoch, index) of fairlead_distributed, or use a plain DataLoader",
            certain=False,
        )
    dataset, module = getattr(loader, "dataset", None), type(loader).__module__
    by_index = dataset is not None and not isinstance(dataset, IterableDataset) and not is_stateful(dataset)
    sampler = getattr(loader, "sampler", None)
    default = type(sampler) in (RandomSampler, SequentialSampler) or type(sampler).__module__.startswith(_TORCHDATA)
    if not (by_index and default and module.startswith(_TORCHDATA)):
        yield Inexact(
            f"the state of a {type(loader).__name__}",
            why="the loader saves and restores its position itself; what it leaves out, such as a shuffle buffer or a "
            "generator, is not seen",
            fix="--prove-resume tries it (fairlead fit, fairlead launch)",
            certain=False,
        )


_TORCHDATA: Final = "torchdata.stateful_dataloader"
