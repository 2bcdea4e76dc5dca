"""What a training begins with: its global batch, the learning rates that follow it, and how its batches are loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import lightning.pytorch as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.utilities import CombinedLoader

from fairlead.errors import ConfigError
from fairlead.resolution import Resolution
from fairlead_distributed.learning_rate import apply_lr_factor
from fairlead_distributed.objects import gather_objects
from fairlead_distributed.ordered_loader import loader_batch_size
from fairlead_distributed.run.session import RunSession
from fairlead_runs.batch_size import GlobalBatch, lr_setting, replicas_in
from fairlead_runs.loader_check import Loading, loader_findings

_BY_HAND: Final = "scale the learning rate yourself (fairlead_distributed.scale_lr), and leave base_batch_size out"
_DO_NOT_GO_TOGETHER: Final = {
    LearningRateFinder: "what it finds is the learning rate of this very batch",
    StochasticWeightAveraging: "it sets its own learning rates (swa_lrs)",
    GradientAccumulationScheduler: "it changes the global batch during the training",
}


class BatchRule:
    """Has the learning rates follow the global batch, by the loaders that the training begins with.

    `total` is the global batch that the job asks for with `batch_size: global`; it is compared with what is seen.
    """

    def __init__(self, resolution: Resolution, say: Callable[[str], None] | None, total: int | None = None) -> None:
        self.total = total
        self._resolution = resolution
        self._say = say
        self._session: RunSession | None = None

    def begin(self, session: RunSession) -> None:
        """A fit of this run begins."""
        self._session = session

    def apply(self, trainer: L.Trainer) -> None:
        """The loaders are there, and what a checkpoint holds of optimizers and schedules is restored."""
        config = self._resolution.trainer
        if config.base_batch_size is not None:
            for callback in vars(trainer)["callbacks"]:
                for kind, why in _DO_NOT_GO_TOGETHER.items():
                    if isinstance(callback, kind):
                        what = f"base_batch_size does not go together with {type(callback).__name__}"
                        raise ConfigError(what, where="trainer.base_batch_size", why=why, fix=_BY_HAND)
        batch = None
        if config.base_batch_size is not None or self.total is not None:
            batch = _batch(trainer, needed=config.base_batch_size is not None)
            self._require_requested(batch)
        change = lr_setting(config, batch) if batch is not None else None
        factor = change.value if change is not None else 1.0
        before = _rates(trainer)
        schedules = [one.scheduler for one in trainer.lr_scheduler_configs]
        ratio = apply_lr_factor(factor, trainer.optimizers, schedules)
        if trainer.is_global_zero:
            say = self._say or trainer.print
            if ratio != 1.0:
                in_all = f"x {factor:.6g}" if ratio == factor else f"x {ratio:.6g}, so x {factor:.6g} in all"
                why = f"{change.reason} ({batch})" if change is not None else "base_batch_size is gone from the job"
                say(f"learning rate {before} -> {_rates(trainer)}: {in_all}, {why}")
            elif config.base_batch_size is None:
                self._report_unchanged_rate(trainer, say, before)
            if self._session is None or not self._session.resumed:
                self._look_at_the_loaders(trainer, say)

    def samples(self, trainer: L.Trainer) -> int | None:
        """The samples of a step over all ranks, as this rank's loader says it; None: it does not."""
        size = _size(trainer)
        return _global(trainer, size).samples if size is not None else None

    def _require_requested(self, batch: GlobalBatch | None) -> None:
        if self.total is not None and batch is not None and batch.samples != self.total:
            trainer = self._resolution.trainer
            raise ConfigError(
                f"the job asks for {self.total} samples to an optimizer step, and the loaders give {batch.samples}",
                where=trainer.batch_size_from,
                why=f"with batch_size: global the loaders' batch size should be its share; seen were {batch}",
                fix="have the loaders take their batch size from that argument, or name the right one in "
                "trainer.batch_size_from",
            )

    def _report_unchanged_rate(self, trainer: L.Trainer, say: Callable[[str], None], rates: str) -> None:
        """A run continues with another global batch, and no setting says that the learning rate is to follow."""
        previous = (self._session.previous if self._session is not None else None) or {}
        ranks = replicas_in(previous)[0] if previous.get("world_size") is not None else None
        accumulate = previous.get("accumulate_grad_batches", 1)
        size = _size(trainer)
        if ranks is None or size is None or self.total is not None:
            return
        old, new = GlobalBatch(size, ranks, 1, accumulate), _global(trainer, size)
        if old.samples != new.samples:
            say(
                f"global batch {old.samples} -> {new.samples} ({new}); the learning rate {rates} stays: "
                "trainer.base_batch_size would have it follow"
            )

    def _look_at_the_loaders(self, trainer: L.Trainer, say: Callable[[str], None]) -> None:
        """What the settings of the job's data did not show already."""
        codes = {finding.code for finding in self._resolution.findings}
        device, ranks = trainer.strategy.root_device.type, trainer.world_size // trainer.num_nodes
        here = dataclasses.replace(self._resolution, devices=ranks, device_type=device)
        for number, loader in enumerate(_loaders(trainer)):
            workers, pinned = (getattr(loader, name, None) for name in ("num_workers", "pin_memory"))
            for finding in loader_findings(Loading(workers, pinned, f"training loader {number}"), here):
                if finding.code not in codes:
                    codes.add(finding.code)
                    say(str(finding))


def _loaders(trainer: L.Trainer) -> list[Any]:
    return CombinedLoader(trainer.train_dataloader).flattened if trainer.train_dataloader is not None else []


def _size(trainer: L.Trainer) -> int | None:
    """The samples of a batch of this rank; None where its loader, or that there are several, does not say it."""
    loaders = _loaders(trainer)
    if len(loaders) != 1:
        return None
    return loader_batch_size(loaders[0])


def _global(trainer: L.Trainer, size: int) -> GlobalBatch:
    replicas = int((trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1))
    shared_by = trainer.world_size // replicas
    drives = getattr(trainer.strategy, "devices_per_rank", 1)
    return GlobalBatch(size, replicas, trainer.num_nodes, trainer.accumulate_grad_batches, shared_by, drives)


def _batch(trainer: L.Trainer, *, needed: bool) -> GlobalBatch | None:
    """What all ranks see; where that is no one number a ConfigError if it is `needed`, else None."""
    sizes: list[Any] = gather_objects(_size(trainer))
    if not needed and (None in sizes or len(set(sizes)) > 1):
        return None
    if None in sizes:
        count = len(_loaders(trainer))
        raise ConfigError(
            "the global batch is not known, and the learning rate is to follow it",
            where="trainer.base_batch_size",
            why=f"the training has {count} loaders" if count != 1 else "its loader has no batch_size",
            fix=_BY_HAND,
        )
    if len(set(sizes)) > 1:
        raise ConfigError(
            "the ranks have batches of different sizes, and the learning rate is to follow the global batch",
            where="trainer.base_batch_size",
            why=f"batch sizes by rank: {', '.join(map(str, sizes))}",
            fix=f"give all the same; or {_BY_HAND}",
        )
    return _global(trainer, sizes[0])


def _rates(trainer: L.Trainer) -> str:
    """The learning rates of all groups, each once; of one that a schedule moves, where it began."""
    rates = {float(g.get("initial_lr", g["lr"])) for one in trainer.optimizers for g in one.param_groups if "lr" in g}
    return ", ".join(f"{rate:.6g}" for rate in sorted(rates))
