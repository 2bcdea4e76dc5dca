"""The loaders of a fit, made ready so that a resumed run draws what an undisturbed one would have drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, cast

import lightning.pytorch as L
import torch
from lightning.fabric.utilities.data import sized_len
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
from fairlead_distributed import ResumableDistributedSampler, SeededSamples, derive_seed
from fairlead_distributed.attributes import Attributes
from fairlead_distributed.batch_order import EpochPosition, ShardedOrder, StatefulOrder
from fairlead_distributed.evaluation_loaders import evaluation_loader
from fairlead_distributed.objects import broadcast_object
from fairlead_distributed.ordered_loader import default_sampler, is_ahead, order_of, over
from fairlead_distributed.plain_data import from_plain, to_plain
from fairlead_distributed.redrawn_order import RedrawnOrder
from fairlead_distributed.user_objects import is_stateful
from fairlead_distributed.worker_seeds import SeededInWorkers, own_generators
from fairlead_lightning import compat
from fairlead_lightning.resume.stateful_loader import SizedLoader, StatefulLoader
from fairlead_lightning.resume.users import watch_loader

# They depend on nothing but their generator and the epoch.
_REDRAWN: Final = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


class Loaders:
    """Makes the loaders of one fit ready, says where they are, and what of them cannot be continued.

    `shards`: the ranks share a loader that does not see to that itself; `saved`: what `state` gave before the resume.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        *,
        seed: int,
        place: Callable[[], EpochPosition],
        kept: Attributes,
        shards: bool,
        saved: Mapping[str, Any] | None = None,
        same_ranks: bool = True,
    ) -> None:
        self.trainer = trainer
        self.seed = seed
        self.reasons: list[Inexact] = []
        self.replayed: dict[int, str] = {}  # by the loader's number: why its epoch is begun again
        self._place = place
        self._kept = kept
        self._saved: list[Any] = from_plain(saved["loaders"]) if saved is not None else []
        self._same_ranks = same_ranks
        self._shards = shards
        self._training: list[object] = []  # made ready for an epoch
        self._epoch = -1
        self._validations = 0

    def state(self) -> dict[str, Any]:
        """Where each training loader is, for this rank; call it where a batch is done."""
        self._say_trials()
        for loader in self._training:
            order = order_of(loader)
            for place, why in order.left.items() if order is not None else ():
                self._inexact(f"loader {place}", why, "give the sampler state_dict and load_state_dict", certain=False)
            dataset = getattr(loader, "dataset", None)
            if isinstance(dataset, SeededInWorkers) and dataset.fairlead_changed:
                self._inexact(
                    "what a loader's workers keep in attributes",
                    "the dataset or collate_fn of each worker changes its own copy, which is in no checkpoint",
                    "num_workers: 0, or a dataset and collate_fn that keep nothing between two samples",
                    certain=False,
                )
        return {"seed": self.seed, "loaders": [self._state(one) for one in self._training]}

    def _say_trials(self) -> None:
        """What the trials of states have shown so far."""
        for number, loader in enumerate(self._training):
            trial = loader.trial if isinstance(loader, StatefulLoader) else None
            if trial is None or not isinstance(loader, StatefulLoader):
                continue
            what = f"the state of training loader {number}, a {type(loader.loader).__name__}"
            self.reasons = [reason for reason in self.reasons if reason.what != what]
            if trial.why is not None:
                self._inexact(what, trial.why, "a state that says all that the next batch depends on")
            elif trial.open:
                why = "whether it leads back is tried on a copy, in an epoch and behind it, and was not yet"
                self._inexact(what, why, "train into the second epoch; fast_dev_run does not reach it", certain=False)
            if trial.replays:
                self.replayed[number] = f"{what}: {trial.not_by_state}; one that began the epoch again did not"
            else:
                self.replayed.pop(number, None)

    def begun(self) -> None:
        """The training has gone on from where it was; what comes now is as in a run that was never interrupted."""
        self._saved = []
        for loader in self._training:
            going_on = loader if isinstance(loader, StatefulLoader) else order_of(loader)
            if going_on is not None:
                going_on.begun()

    def asked_again(self, *, anew: bool) -> None:
        """The training's loaders come once more, the first one first; `anew`: for another epoch than those before."""
        self._training, self._saved = [], [] if anew else self._saved

    def validation_asked(self) -> None:
        """The validation's loaders come, the first one first."""
        self._validations = 0

    def prepare(self, loader: object, *, training: bool) -> object:
        """One loader as the user made it, made ready for the training or for an evaluation."""
        if not training:
            if self.trainer.state.fn == "fit":
                watch_loader(self._kept, f"validation loader {self._validations}", loader)
                self._validations += 1
            return self._evaluated(loader)
        epoch = self._place().epoch
        if epoch != self._epoch:
            self._training, self._epoch = [], epoch
        watch_loader(self._kept, f"loader {len(self._training)}", loader)
        ready = self._trained(loader, len(self._training))
        number = len(self._training)
        if number < len(self._saved) and self._saved[number] is not None:
            self._load(ready, self._saved[number], number)
        self._training.append(ready)
        self._say_trials()
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
            self._check_carried(loader)
            kind = SizedLoader if sized_len(loader) is not None else StatefulLoader
            return kind(self._sharded(loader), derive_seed("loader", self.seed, number), self._place)
        name = type(loader).__name__
        if not isinstance(loader, DataLoader):
            self._inexact(
                f"the training loader {name}",
                "it has no state_dict: it starts over when the run resumes",
                "give it state_dict and load_state_dict, or use a torch.utils.data.DataLoader",
            )
            return self._sharded(loader)
        if isinstance(loader.dataset, IterableDataset):
            self._inexact(
                f"the IterableDataset {type(loader.dataset).__name__}",
                "a stream has no position to resume from: it starts over",
                "use torchdata's StatefulDataLoader with state_dict and load_state_dict in the dataset, "
                "or a dataset with __getitem__ and __len__",
            )
            return self._sharded(loader)
        if loader.batch_sampler is None:
            self._inexact(
                "a training loader with batch_size=None",
                "its samples are not counted in batches",
                "let the loader make batches, or give it state_dict and load_state_dict",
            )
            return self._sharded(loader)
        self._check_generators(loader)
        if type(loader).__iter__ is not DataLoader.__iter__:
            self._inexact(
                f"the __iter__ of {name}",
                "what it adds to that of DataLoader is unknown",
                "give the loader state_dict and load_state_dict, or do it in the dataset or the sampler",
            )
        if not loader.in_order and loader.num_workers:
            self._inexact(
                "a training loader with in_order=False",
                "the workers decide by their speed which batch comes next",
                "leave in_order out",
            )
        return self._ordered(loader, number)

    def _ordered(self, loader: DataLoader[Any], number: int) -> DataLoader[Any]:
        seed = derive_seed("loader", self.seed, number) if number else self.seed
        batches: Any = loader.batch_sampler
        plain = type(batches) is BatchSampler
        sampler: Any = batches.sampler if plain else loader.sampler
        sharding = self._to_be_sharded(loader)
        once = partial(compat.ends_with_longest, self.trainer)
        common: dict[str, Any] = {"seed": seed, "place": self._place, "generator": torch.Generator(), "once": once}
        if is_ahead(loader):
            common |= {"copied": Attributes(), "persistent": loader.persistent_workers}
            watch_loader(common["copied"], "loader", loader)
        if plain and type(sampler) is ResumableDistributedSampler:
            common["seed"] = sampler.seed
            return over(loader, ShardedOrder(batches, **common), seed)
        if (
            plain
            and (default := default_sampler(sampler, loader)) is not None
            and (sharding or self.trainer.world_size == 1)
        ):
            shards: Mapping[str, Any] = self._parts()
            common["seed"] = broadcast_object(default.pop("seed", seed))  # a generator that ranks have seeded apart
            parts = ResumableDistributedSampler(
                loader.dataset, **shards, **default, tag_epoch=isinstance(loader.dataset, SeededSamples)
            )
            order = ShardedOrder(BatchSampler(parts, batches.batch_size, batches.drop_last), **common)
            return over(loader, order, seed)
        ahead = max(1, loader.num_workers * (loader.prefetch_factor or 2))
        stateful = next((one for one in (batches, sampler) if is_stateful(one)), None)
        known = plain and type(sampler) in _REDRAWN
        if sharding:
            loader = self._sharded(loader)
            batches = loader.batch_sampler
        if stateful is not None and not sharding:
            return over(loader, StatefulOrder(batches, stateful, ahead=ahead, **common), seed)
        if stateful is not None:
            self._inexact(
                f"the sampler {type(stateful).__name__}",
                "Lightning shards what it draws, which hides its state",
                "shard in it (a DistributedSampler), or set use_distributed_sampler: false",
            )
        elif not known:
            self._inexact(
                f"the sampler {type(sampler).__name__}" if plain else f"the batch sampler {type(batches).__name__}",
                "it has no state_dict; its batches are drawn again from a seed of the epoch, "
                "which is exact only if they depend on nothing but that and its attributes",
                "give it state_dict and load_state_dict, or use ResumableDistributedSampler",
                certain=False,
            )
        further = {"sharded": sampler} if sharding else {}
        return over(
            loader, RedrawnOrder(batches, ahead=ahead, further=further, apart=(loader.dataset,), **common), seed
        )

    def _check_carried(self, loader: Any) -> None:
        if getattr(loader, "num_workers", 0):
            self._inexact(
                f"the workers of a {type(loader).__name__}",
                "their random generators are not in its state; without random samples it is exact",
                "draw from sample_rng(seed, epoch, index) of fairlead_distributed, or use a plain DataLoader",
                certain=False,
            )
        length, limit = sized_len(loader), self.trainer.limit_train_batches
        whole = limit == 1.0 if isinstance(limit, float) else length is not None and limit >= length
        if not whole:
            self._inexact(
                f"limit_train_batches: {limit} with a {type(loader).__name__}",
                "the limit leaves an epoch in the middle; its state says how to go on there, not how to begin another",
                "leave out the limit, or let the loader have fewer batches",
            )

    def _check_generators(self, loader: DataLoader[Any]) -> None:
        if not is_ahead(loader):
            return  # they are saved with the other attributes of the dataset
        held = [f"dataset.{name}" for name in own_generators(loader.dataset)]
        held += [f"collate_fn.{name}" for name in own_generators(loader.collate_fn)]
        if held:
            self._inexact(
                f"the random generator {', '.join(held[:3])} of {type(loader.dataset).__name__}",
                "only the global generators are saved",
                "draw from them, or from sample_rng(seed, epoch, index) of fairlead_distributed",
            )

    def _load(self, loader: object, saved: Mapping[str, Any], number: int) -> None:
        order = order_of(loader)
        kind = "loader" if isinstance(loader, StatefulLoader) else type(order).__name__ if order is not None else None
        if kind is None or saved["kind"] != kind:
            return  # nothing is carried, or the job's loader is another now; the start has said so
        state = saved["state"]
        if isinstance(loader, StatefulLoader):
            if self._same_ranks:
                loader.load(state)
        elif isinstance(order, ShardedOrder):
            order.load_state_dict(state if self._same_ranks else {**state, "copies": {}})
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
        if not isinstance(made, DataLoader) or isinstance(made.dataset, IterableDataset) or is_stateful(made):
            return made
        own = [made.generator, getattr(made.sampler, "generator", None), *own_generators(made.batch_sampler)]
        if made.batch_sampler is None or (made.num_workers == 0 and not any(one is not None for one in own)):
            return made  # what it draws comes from the generators of this process
        order = RedrawnOrder(
            cast("Any", made.batch_sampler),
            seed=derive_seed("evaluation", self.seed),
            place=lambda: EpochPosition(self._place().epoch, 0),
            generator=torch.Generator(),
            ahead=0,
            further={},
            apart=(made.dataset,),
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
        reason = Inexact(what, why=because, fix=do, certain=certain)
        if reason not in self.reasons:
            self.reasons.append(reason)
