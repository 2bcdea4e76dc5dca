"""The loaders of a fit, made ready so that a resumed run draws what an undisturbed one would have drawn."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import lightning.pytorch as L
import torch
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from fairlead.findings import Inexact
from fairlead_distributed import derive_seed
from fairlead_distributed.attributes import Attributes
from fairlead_distributed.batch_order import EpochPosition, Order, ShardedOrder
from fairlead_distributed.evaluation import evaluation_loader
from fairlead_distributed.ordered_loader import (
    Replicas,
    begins_anew,
    is_ahead,
    is_ordered,
    may_differ,
    order_of,
    over,
    replayed_order,
    sampler_of,
    set_in_training,
    sharded_order,
    unsaved_changes,
    watch_loader,
)
from fairlead_distributed.plain_data import from_plain, is_stateful, to_plain
from fairlead_distributed.rng import IsolatedGenerators, rng_state, set_rng_state
from fairlead_lightning import compat

_END: Final = object()


class StatefulLoader:
    """A loader with `state_dict` (StatefulDataLoader and the like), saved for each rank, and trusted.

    Lightning takes one batch ahead of a loader without a length; the state before that batch is saved for it.
    """

    def __init__(self, loader: Any, seed: int, position: Callable[[], EpochPosition]) -> None:
        self.loader = loader
        self._seed = seed
        self._position = position
        self._finished = False
        self._resume: Mapping[str, Any] | None = None
        self._from = EpochPosition(-1, 0)
        self._fetched = 0
        self._before: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "__len__"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        state = self._resume
        if state is not None and state["state"] is not None and not self._begins_by_generator():
            if self._position().batches:
                self._tell(state["epoch"])
            self.loader.load_state_dict(state["state"])
        self._from, self._fetched, self._before, self._finished = self._position(), 0, None, False
        if state is not None and state["rng"] is not None:
            set_rng_state(state["rng"])  # what the batch that was taken ahead was made with
        with IsolatedGenerators(derive_seed("carried", self._seed, self._from.epoch)):
            iterator = iter(self.loader)  # a state may need more than one iterator
        return self._batches(iterator)

    def _begins_by_generator(self) -> bool:
        """Whether an epoch begins that only the loader's own generator decides; its state would draw from it first."""
        dataset, generator = (getattr(self.loader, name, None) for name in ("dataset", "generator"))
        ordered = not is_stateful(dataset) and not isinstance(dataset, IterableDataset)
        return ordered and isinstance(generator, torch.Generator) and self._position().batches == 0

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        length = sized_len(self)
        while True:
            if length is None:
                self._before = {**self._take(), "rng": rng_state()}
            batch = next(iterator, _END)
            self._finished = batch is _END
            if self._finished:
                return
            self._fetched += 1
            if length is not None and self._from.batches + self._fetched == length:
                # Lightning asks for no more; the state would be one inside this epoch.
                self._finished = next(iterator, _END) is _END
            yield batch

    def _take(self) -> dict[str, Any]:
        """The loader's state, as a copy, and the epoch of its dataset."""
        epoch = getattr(getattr(self.loader, "dataset", None), "epoch", None)
        state = copy.deepcopy(self.loader.state_dict())
        return {"state": state, "epoch": epoch if isinstance(epoch, int) else None, "rng": None}

    def _tell(self, epoch: int | None) -> None:
        """Sets the dataset's epoch: a loader that resumes inside one does not."""
        tell = getattr(getattr(self.loader, "dataset", None), "set_epoch", None)
        if callable(tell) and epoch is not None:
            tell(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: Lightning would carry that of rank 0 for all."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing."""

    def taken(self) -> dict[str, Any]:
        """The state behind the last batch that was trained on."""
        position = self._position()
        inside = position.epoch == self._from.epoch
        if not inside and not self._finished:
            return {"state": None, "epoch": None, "rng": None}  # a limit has cut the epoch: the next one begins anew
        ahead = self._before if inside and self._fetched > position.batches - self._from.batches else None
        return ahead if ahead is not None else self._take()

    def load(self, state: Mapping[str, Any]) -> None:
        """Has the iterators continue there, until `begun`."""
        self._resume = state

    def begun(self) -> None:
        """The training has continued: the next iterator begins an epoch."""
        self._resume = None


class SizedLoader(StatefulLoader):
    """A carried loader that has a length."""

    def __len__(self) -> int:
        return len(self.loader)


class Loaders:
    """Makes the loaders of one fit ready, says where they are, and what of them cannot be continued.

    `shards`: the ranks share a loader that does not see to that itself; `saved`: what `state` gave before the resume.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        *,
        seed: int,
        position: Callable[[], EpochPosition],
        attributes: Attributes,
        shards: bool,
        saved: Mapping[str, Any] | None = None,
        same_ranks: bool = True,
    ) -> None:
        self.trainer = trainer
        self.seed = seed
        self.reasons: list[Inexact] = []
        self._position = position
        self._attributes = attributes
        self._saved: list[Any] = from_plain(saved["loaders"]) if saved is not None else []
        self._same_ranks = same_ranks
        self._shards = shards
        self._training: list[object] = []  # made ready for an epoch
        self._epoch = -1
        self._validations = 0

    def state(self) -> dict[str, Any]:
        """Where each training loader is, for this rank; call it where a batch is done."""
        for loader in self._training:
            self._add(unsaved_changes(loader))
        return {"seed": self.seed, "loaders": [self._state(one) for one in self._training]}

    def begun(self) -> None:
        """The training has gone on from where it was; what comes now is as in a run that was never interrupted."""
        self._saved = []
        for loader in self._training:
            going_on = loader if isinstance(loader, StatefulLoader) else order_of(loader)
            if going_on is not None:
                going_on.begun()

    def rebuilt(self, *, anew: bool) -> None:
        """The training's loaders come once more, the first one first; `anew`: for another epoch than those before."""
        self._training, self._saved = [], [] if anew else self._saved

    def validation_requested(self) -> None:
        """The validation's loaders come, the first one first."""
        self._validations = 0

    def prepare(self, loader: object, *, training: bool) -> object:
        """One loader as the user made it, made ready for the training or for an evaluation."""
        if not training:
            if self.trainer.state.fn == "fit":
                watch_loader(self._attributes, f"validation loader {self._validations}", loader)
                self._validations += 1
            return self._evaluated(loader)
        epoch = self._position().epoch
        if epoch != self._epoch:
            self._training, self._epoch = [], epoch
        watch_loader(self._attributes, f"loader {len(self._training)}", loader)
        ready = self._trained(loader, len(self._training))
        number = len(self._training)
        if number < len(self._saved) and self._saved[number] is not None:
            self._load(ready, self._saved[number], number)
        self._training.append(ready)
        return ready

    def _to_be_sharded(self, loader: object) -> bool:
        return (
            self._shards
            and isinstance(loader, DataLoader)
            and not isinstance(loader.sampler, DistributedSampler)
            and not isinstance(loader.dataset, IterableDataset)
        )

    def _sharded(self, loader: Any, shuffle: bool = True) -> Any:
        """The loader, or this rank's part of one that is to be sharded; a user's sampler is shuffled in training."""
        if not self._to_be_sharded(loader):
            return loader
        shuffle = shuffle and not vars(self.trainer)["overfit_batches"]
        return compat.sharded(loader, shuffle, self.seed, self._parts())

    def _parts(self) -> Mapping[str, int]:
        return self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}

    def _trained(self, loader: object, number: int) -> object:
        if is_stateful(loader):
            self._add(may_differ(loader))
            self._check_limit(loader)
            kind = SizedLoader if sized_len(loader) is not None else StatefulLoader
            return kind(self._sharded(loader), derive_seed("loader", self.seed, number), self._position)
        if not isinstance(loader, DataLoader) or not is_ordered(loader):
            self._add([begins_anew(loader)])
            return self._sharded(loader)
        seed = derive_seed("loader", self.seed, number) if number else self.seed
        order = self._order(loader, seed, number)
        self._add(may_differ(loader))
        return over(loader, order, seed)

    def _order(self, loader: DataLoader[Any], seed: int, number: int) -> Order:
        arguments: dict[str, Any] = {"position": self._position, "generator": torch.Generator()}
        arguments["once"] = partial(compat.ends_with_longest, self.trainer)
        dataset, sampler, collate = loader.dataset, loader.sampler, loader.collate_fn
        copied: list[Any] = [dataset, collate] if is_ahead(loader) else []
        arguments |= {"copied": lambda: self._attributes.fingerprint(copied), "persistent": loader.persistent_workers}
        sharding = self._to_be_sharded(loader)
        own = isinstance(sampler, DistributedSampler)
        if sharding or own or self.trainer.world_size == 1:
            parts = self._parts()
            replicas = Replicas(parts["num_replicas"], parts["rank"])
            order = sharded_order(loader, lambda: replicas, seed, **arguments)
            if order is not None:
                return order
        drawn_from = sampler_of(loader)
        if not is_stateful(drawn_from):
            self._attributes.watch(f"loader {number} sampler", drawn_from, only=set_in_training(drawn_from))
        names = sorted(set_in_training(drawn_from) or ())
        arguments["copied"] = lambda: self._attributes.fingerprint(
            [copied, [getattr(sampler, name, None) for name in names]]
        )
        if sharding and any(map(is_stateful, (loader.batch_sampler, sampler))):
            self._inexact(
                f"the sampler {type(sampler).__name__}",
                "Lightning shards what it draws, which hides its state",
                "shard in it (a DistributedSampler), or set use_distributed_sampler: false",
            )
        return replayed_order(self._sharded(loader), seed=seed, **arguments)

    def _check_limit(self, loader: object) -> None:
        length, limit = sized_len(loader), self.trainer.limit_train_batches
        full_epoch = limit == 1.0 if isinstance(limit, float) else length is not None and limit >= length
        if not full_epoch:
            self._inexact(
                f"limit_train_batches: {limit} with a {type(loader).__name__}",
                "the limit leaves an epoch in the middle; its state can continue that one, not begin another",
                "leave out the limit, or let the loader have fewer batches",
            )

    def _load(self, loader: object, saved: Mapping[str, Any], number: int) -> None:
        order = order_of(loader)
        kind = "loader" if isinstance(loader, StatefulLoader) else type(order).__name__ if order is not None else None
        if kind is None or saved["kind"] != kind:
            return  # nothing is saved, or the job has another loader now; the start has reported that
        state = saved["state"]
        if isinstance(loader, StatefulLoader):
            if self._same_ranks:
                loader.load(state)
        elif isinstance(order, ShardedOrder):
            order.load_state_dict(state)
            if not self._same_ranks and number == 0:
                compat.set_batches_done(self.trainer, len(order) - order.batches_left(int(state["consumed"])))
        elif order is not None and self._same_ranks:
            order.load_state_dict(state)

    def _evaluated(self, loader: object) -> object:
        made: object = None
        if isinstance(loader, DataLoader) and self._to_be_sharded(loader):
            made = evaluation_loader(loader, **self._parts())
        if made is None:
            made = self._sharded(loader, shuffle=isinstance(getattr(loader, "sampler", None), RandomSampler))
        if not isinstance(made, DataLoader) or not is_ordered(made) or is_stateful(made):
            return made
        own = [made.generator, *(getattr(one, "generator", None) for one in (made.sampler, made.batch_sampler))]
        if made.num_workers == 0 and not any(one is not None for one in own):
            return made  # what it draws comes from the generators of this process
        order = replayed_order(
            made,
            seed=derive_seed("evaluation", self.seed),
            position=lambda: EpochPosition(self._position().epoch, 0),
            generator=torch.Generator(),
        )
        return over(made, order, self.seed)

    def _state(self, loader: object) -> dict[str, Any] | None:
        order = order_of(loader)
        if isinstance(loader, StatefulLoader):
            kind, state = "loader", loader.taken()
        elif order is not None:
            kind, state = type(order).__name__, order.state_dict()
        else:
            return None
        try:
            return {"kind": kind, "state": to_plain(state, "its state")}
        except TypeError as error:
            self._inexact(
                f"the state_dict of {type(loader).__name__}",
                f"{error}; it is not saved",
                "let state_dict return numbers, texts, tensors, arrays, and lists and dicts of them",
            )
            return None

    def _inexact(self, what: str, because: str, do: str, *, certain: bool = True) -> None:
        self._add([Inexact(what, why=because, fix=do, certain=certain)])

    def _add(self, reasons: Iterable[Inexact]) -> None:
        self.reasons += [reason for reason in reasons if reason not in self.reasons]


class LoaderRequests:
    """The state in which the training's loaders were requested, so that a resumed fit builds the same."""

    def __init__(self) -> None:
        self._state: dict[str, Any] | None = None
        self._at: tuple[int, int] | None = None
        self._data: dict[str, Any] = {}
        self._validation: Mapping[str, Any] | None = None
        self._validation_before: Mapping[str, Any] | None = None
        self.later = False
        """Whether the fit that this one resumes had not requested the validation's loaders yet: its training continues
        before they are requested."""

    def resume(self, rank: Mapping[str, Any] | None) -> None:
        """Has the validation's loaders be requested as in the fit that this one resumes, by the state of its rank."""
        if rank is not None and "requested_validation" in rank:
            self._validation_before = rank["requested_validation"]
            self.later = self._validation_before is None

    @contextmanager
    def validation(self, trainer: L.Trainer) -> Iterator[None]:
        """The validation's loaders are requested inside the block, and in a resumed fit in the same state."""
        before, self._validation_before = self._validation_before, None
        now = rng_state()
        here = {
            "rng": now,
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "data": _state_of_data(trainer),
        }
        self._validation = before if before is not None else here
        if before is not None:
            set_rng_state(before["rng"])
        at = (before["epoch"], before["step"]) if before is not None else None
        with compat.as_at(trainer, at), _data_as(trainer, before.get("data", {}) if before is not None else {}):
            yield
        if before is not None:
            set_rng_state(now)
            compat.set_validation_requested(trainer, before["epoch"])

    def state(self, attributes: Attributes) -> dict[str, Any]:
        """For the checkpoint; of the training's None where they are made once, at the start, as each start does.

        A dataset that replaced another is as it was made: the other's attributes are not its own.
        """
        requested = self._state
        if requested is not None:
            own = {name: one for name, one in requested["attributes"].items() if name not in attributes.replaced}
            requested = {**requested, "attributes": own}
        validation = self._validation if self._validation is not None else self._validation_before
        return {
            "requested": requested,
            "requested_at": self._at,
            "requested_data": self._data,
            "requested_validation": validation,
        }

    @contextmanager
    def training(
        self, trainer: L.Trainer, attributes: Attributes, before: Mapping[str, Any], *, same_ranks: bool
    ) -> Iterator[tuple[int, int] | None]:
        """The training's loaders are requested inside the block, in a resumed fit as at the epoch and step it gives.

        `before` is the state of the fit that is resumed, or empty.
        """
        at = before.get("requested_at")
        self._at = at if at is not None else (trainer.current_epoch, trainer.global_step)
        self._data = before.get("requested_data", {}) if before else _state_of_data(trainer)
        if vars(trainer)["reload_dataloaders_every_n_epochs"]:
            attributes.replaced.clear()
            saved = before.get("requested") if same_ranks else None
            if saved is None:
                self._state = {"attributes": copy.deepcopy(attributes.state()), "rng": rng_state()}
            else:
                self._state = dict(saved)
                # Lightning's GradientAccumulationScheduler begins with the trainer's own settings; they come later.
                attributes.restore({name: one for name, one in saved["attributes"].items() if name != "trainer"})
                set_rng_state(saved["rng"])
        with compat.as_at(trainer, at), _data_as(trainer, self._data if before else {}):
            yield at


def _state_of_data(trainer: L.Trainer) -> dict[str, Any]:
    """What the data module says of itself; nothing, where it can only do so with its loaders made."""
    data: L.LightningDataModule | None = vars(trainer).get("datamodule")
    try:
        return copy.deepcopy(data.state_dict()) if data is not None else {}
    except Exception:  # as of a loader that it does not have yet: Lightning asks for the state later, in a save
        return {}


@contextmanager
def _data_as(trainer: L.Trainer, state: dict[str, Any]) -> Iterator[None]:
    """The data module has this state inside the block, unless that is empty.

    One that counts in `train_dataloader`, or begins a loader behind the batches that it has counted, would make another
    loader than in the fit that is resumed: Lightning has loaded the state of the checkpoint.
    """
    data: L.LightningDataModule | None = vars(trainer).get("datamodule")
    if not state or data is None:
        yield
        return
    now = _state_of_data(trainer)
    data.load_state_dict(copy.deepcopy(state))
    yield
    data.load_state_dict(now)
