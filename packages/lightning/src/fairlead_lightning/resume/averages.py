"""What the ranks log for an epoch, made one number on all of them: that of a single process over all samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import lightning.pytorch as L
import torch
import torch.distributed as dist
from torch import Tensor

from fairlead_distributed.evaluation import shard_of
from fairlead_lightning import compat
from fairlead_lightning.compat import Logged
from fairlead_lightning.resume.rank_state import data_rank

_END: Final = math.inf  # comes after the loaders of an evaluation
_OUTSIDE_BATCHES: Final = {
    f"on_{stage}_{moment}" for stage in ("validation", "test") for moment in ("start", "epoch_start", "epoch_end")
}


class _Part(NamedTuple):
    """What one rank brings together with the others."""

    point: float  # how far it is: a loader's number, or the end
    shard: int  # which part of the data it has; ranks that share a model's layers have the same
    logged: dict[str, Logged]


@compat.only_its_own_batch_hooks
class AverageOverRanks(L.Callback):
    """Makes what `self.log` accumulates over an epoch or an evaluation the value of all ranks together.

    Means are weighted by samples, sums are added up, a minimum or maximum is that of all: `val/loss` on N ranks is that
    of one process up to rounding, and plateau schedulers and early stopping decide alike.  Values of a step are left
    alone, and so is what is logged with `rank_zero_only=True`; a `sync_dist_group` is respected.  A key that only some
    ranks log is averaged over these, and all have it.  A value that is logged in `on_validation_epoch_end` counts by
    the rank's number of samples; a float32 value that all ranks agree on stays as it is.

    A batch that is nothing but padding (of `evaluation_loader`) runs as any other, since other ranks wait for its
    collectives, but does not count in what is logged, nor in torchmetrics that are attributes of the module.  It does
    where a step takes batches of several loaders (`CombinedLoader`) or draws from `dataloader_iter`, in lists of single
    numbers of torchmetrics, and in what a module collects by itself.

    For each loader, once at the end of an evaluation and twice at that of a training epoch the ranks exchange about 200
    bytes for each value.  It has to be the first callback: it holds back what comes after it in a batch of padding.
    """

    def __init__(self) -> None:
        self._active = False
        self._done: dict[str, Tensor] = {}
        self._samples: int | None = None  # evaluated by this rank; None: not known
        self._loader: int | None = None  # the last that this evaluation is through with
        self._undo: list[Callable[[], Any]] = []  # to the end of the fit
        self._held: list[Callable[[], Any]] = []  # to the end of the loader

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Attaches to the evaluations of this fit or evaluation."""
        self._detach()
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._active = several and trainer.world_size > 1 and not trainer.barebones and stage != "predict"
        if self._active:
            self._undo.append(compat.before_epoch_results(trainer, lambda number: self._end_loader(trainer, number)))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Detaches."""
        self._detach()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Detaches; Lightning calls no `teardown` then."""
        self._detach()

    # -- evaluation

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins to count samples."""
        self._done, self._samples, self._loader = {}, 0, None

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Holds back what is made of a batch of padding."""
        if not self._active:
            return
        loaders = compat.evaluation_loaders(trainer)
        shard = shard_of(loaders[dataloader_idx]) if loaders else None
        if shard is None:
            self._samples = None
        elif shard.is_padding_batch(batch_idx):
            self._held += [compat.hold_metrics(pl_module), compat.hold_logged(trainer)]
        elif self._samples is not None:
            self._samples += shard.batch_length(batch_idx)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Has the values averaged that are logged in this hook."""
        self._after_hook(trainer, pl_module, "on_validation_epoch_end")

    on_test_start = on_validation_start
    on_test_batch_start = on_validation_batch_start

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """As in a validation."""
        self._after_hook(trainer, pl_module, "on_test_epoch_end")

    def _end_loader(self, trainer: L.Trainer, number: int) -> None:
        if number != self._loader:
            self._loader = number
            self._average(trainer, number)

    # -- training

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Averages the values of the epoch, then those that are logged in this hook."""
        if self._active:
            self._done, self._samples = {}, None
            self._average(trainer, 0)
            self._after_hook(trainer, pl_module, "on_train_epoch_end")

    # -- both

    def _after_hook(self, trainer: L.Trainer, pl_module: L.LightningModule, hook: str) -> None:
        """Averages right after the module's own hook, which is the next to be called: what monitors reads then."""
        if not self._active:
            return
        attributes, own = vars(pl_module), getattr(pl_module, hook)
        before = {hook: attributes[hook]} if hook in attributes else {}

        def undo() -> None:
            attributes.pop(hook, None)
            attributes.update(before)

        def once() -> None:
            self._undo.remove(undo)
            undo()
            own()
            self._average(trainer, _END)

        attributes[hook] = once
        self._undo.append(undo)

    def _average(self, trainer: L.Trainer, point: float) -> None:
        """A collective, and the same number of them on all ranks; see `_together`."""
        while self._held:
            self._held.pop()()
        mine = {key: self._weighed(one) for key, one in compat.logged_for_epoch(trainer, self._done).items()}
        parts = _together(_Part(point, data_rank(trainer), mine))
        for key in dict.fromkeys(key for part in parts.values() for key in part.logged):
            logged = {rank: part.logged[key] for rank, part in parts.items() if key in part.logged}
            ours = mine.get(key) or next((one for one in logged.values() if one.ranks is None), None)
            if ours is None:
                continue  # of a group without this rank
            by_shard: dict[int, Logged] = {}
            for rank, one in logged.items():
                if ours.ranks is None or rank in ours.ranks:
                    by_shard.setdefault(parts[rank].shard, one)
            counted = list(by_shard.values())
            wide = any(one.dtype == torch.float64 for one in counted)
            ours = dataclasses.replace(ours, dtype=torch.float64 if wide else ours.dtype)
            self._done[key] = compat.set_logged(trainer, key, ours, merged(counted))

    def _weighed(self, one: Logged) -> Logged:
        """A value without a batch weighs as much as the rank's samples."""
        if self._samples is None or one.reduction != "mean" or one.hook not in _OUTSIDE_BATCHES or one.weight != 1:
            return one
        return dataclasses.replace(one, value=one.value * self._samples, weight=float(self._samples))

    def _detach(self) -> None:
        self._active, self._done = False, {}
        for undo in (*self._held, *self._undo):
            undo()
        self._held, self._undo = [], []


def merged(logged: Sequence[Logged]) -> float:
    """The value of all ranks from what each part of the data has logged; NaN where no sample counts."""
    values = torch.tensor([one.value for one in logged], dtype=torch.float64)
    if logged[0].reduction in ("min", "max"):
        return float(values.min() if logged[0].reduction == "min" else values.max())
    if logged[0].reduction == "sum":
        return float(values.sum())
    counted = [one for one in logged if one.weight]  # what comes of no sample may be NaN
    weight = sum(one.weight for one in counted)
    return sum(one.value for one in counted) / weight if weight else math.nan


def _together(part: _Part) -> dict[int, _Part]:
    """The parts of the ranks that are at this point, by rank.

    A rank that had no batch of a loader comes to no point there.  The others must not take its next part for that of
    this loader, so it takes part, and waits, until all that are behind it have come to its own point.
    """
    while True:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, part)
        point = min(other.point for other in everyone)
        if point == part.point:
            return {rank: other for rank, other in enumerate(everyone) if other.point == point}
