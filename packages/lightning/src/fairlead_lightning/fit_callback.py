"""The translation for Lightning: what its hooks mean to a run, in the order in which everything is done.

Lightning calls `FitCallback` before the user's callbacks and `LastCallback` behind them; what happens between two steps
`compat.watch_boundaries` calls, as no hook comes there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import lightning.pytorch as L
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.loggers import Logger
from torch import Tensor

from fairlead.config import CheckpointConfig, JobConfig
from fairlead.findings import Inexact
from fairlead.interfaces import BuildContext
from fairlead_distributed.run.session import RunSession
from fairlead_distributed.run.silent_faults import SampleCheck
from fairlead_distributed.run.step_facts import measure_steps
from fairlead_launch.reports import REPORT_FD
from fairlead_lightning import compat
from fairlead_lightning.checkpoint.checkpoints import Checkpoints
from fairlead_lightning.checkpoint.finite import Finite
from fairlead_lightning.checkpoint.replicas import Replicas
from fairlead_lightning.display.model_summary import leave_out_zeros
from fairlead_lightning.display.quiet import only_rank_0_warns
from fairlead_lightning.fit import callbacks_of, trains_here
from fairlead_lightning.lifecycle.batch_rule import BatchRule
from fairlead_lightning.lifecycle.even_epochs import EvenEpochs
from fairlead_lightning.lifecycle.monitors import Monitors
from fairlead_lightning.lifecycle.recorder import Recorder
from fairlead_lightning.lifecycle.stops import StopRequested, Stops
from fairlead_lightning.lifecycle.stuck import StuckRanks
from fairlead_lightning.lifecycle.trainable import Trainable, reshard
from fairlead_lightning.module_reduce import lend_all_reduce, take_all_reduce_back
from fairlead_lightning.resume.averages import AverageOverRanks
from fairlead_lightning.resume.exact_resume import ExactResume
from fairlead_lightning.resume.rank_state import data_rank
from fairlead_runs.batch_size import global_batch
from fairlead_runs.guard import StopGuard
from fairlead_runs.lasting_output import give_output_back, keep_output


@compat.only_its_own_batch_hooks
class FitCallback(L.Callback):
    """Fairlead's part of one fit after another, and of the evaluations of the same Trainer.

    Without a run (an evaluation, a `fast_dev_run`) it prepares loaders and sees to the learning rates. A finished run
    is restored besides. In one that trains, everything is watched, recorded and saved.

    Args:
        context: What the settings are resolved to here.
        say: Prints on rank 0; None: each part uses its own default output.
        seed: The seed of the job.
        inexact: What of the settings keeps a resume from being exact; None: found in the script's Trainer.
        guard: What stops a fit, with handlers that are installed already.
        job: The job, where there is one.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        say: Callable[[str], None] | None = None,
        seed: int | None = None,
        inexact: Sequence[Inexact] | None = None,
        guard: StopGuard | None = None,
        job: JobConfig | None = None,
    ) -> None:
        resolution, environ = context.resolution, context.environ
        config = resolution.trainer
        self.exact = ExactResume(seed, environ=environ, settings=inexact, say=say)
        self.stops = Stops(context, say, guard)
        self.stuck = StuckRanks(environ, timeout=getattr(resolution.strategy, "timeout", None))
        self.averages = AverageOverRanks()  # a separate callback: it has to be the first
        self.last = LastCallback(self)
        self._barebones = bool(config.barebones)
        self.batch = BatchRule(resolution, say, global_batch(job, config))
        self.even = EvenEpochs(say)
        self.samples = SampleCheck(say or print, _SAMPLES) if config.check_samples else None
        self.finite = Finite(config.max_non_finite, say)
        self.trainable = Trainable(self.exact.reduce_in_order)
        self.replicas = Replicas(config.on_divergence, config.check_divergence_every_n_steps, config.local_buffers)
        self._resolution = resolution
        self._say = say
        self._by_hand = False
        self._logged = REPORT_FD in environ  # each rank except the first writes its own file
        self._session: RunSession | None = None
        self.recorder: Recorder | None = None
        """What records this fit; None: it trains no run."""
        self.monitors: Monitors | None = None
        self.checkpoints: Checkpoints | None = None
        self._loggers: list[Logger] = []
        self._hides = False
        self._undo: list[Callable[[], None]] = []
        self._unwatch: Callable[[], None] = _nothing

    def __getstate__(self) -> dict[str, Any]:
        """Spawned ranks begin with `setup`."""
        return {**self.__dict__, "_undo": [], "_unwatch": _nothing}

    def initial_callbacks(self) -> list[L.Callback]:
        """The callbacks that a `fairlead.Trainer` installs when it is made, before the user's."""
        return [self] if self._barebones else [self.averages, self]

    # -- one fit

    def attach(
        self,
        trainer: L.Trainer,
        session: RunSession,
        config: CheckpointConfig | None,
        loggers: Sequence[Logger] = (),
    ) -> list[L.Callback]:
        """A fit of this run begins: gives the trainer what belongs to it, and returns the callbacks among that.

        Args:
            trainer: Has the strategy already.
            session: The run; of a finished one nothing is recorded.
            config: When to save; None: never.
            loggers: Those of the run.
        """
        keep_output()
        self._session = session
        self.checkpoints = Checkpoints(config, session, self.exact, self.check_state) if config is not None else None
        if session.finished is None:
            for part in (self.even, self.finite, self.replicas):
                part.begin(session)
            here = trains_here(self._resolution)
            self.stuck.begin(trainer, session, here=here)
            self.stops.begin(trainer, session, self.checkpoints, here=here)
            self.monitors = Monitors(config, session, self._say)
            self.recorder = Recorder(session, self.stops)
        self.batch.begin(session)
        self.exact.begin(session, self._loader_made, self._restored)
        if session.resumed:  # its first start has given Lightning's advice
            self._hides = _ADVICE not in warnings.filters
            warnings.simplefilter("ignore", PossibleUserWarning)
        if trainer.global_rank > 0 and not self._logged:
            self._undo.append(only_rank_0_warns())
        self._undo.append(compat.less_overhead(trainer))
        leave_out_zeros(callbacks_of(trainer))
        first: list[L.Callback] = [self.averages, self]
        last: list[L.Callback] = [self.last, *([self.checkpoints] if self.checkpoints is not None else [])]
        vars(trainer)["callbacks"] = [*first, *_of_others(trainer), *last]
        self._loggers = list(loggers)
        trainer.loggers = [*trainer.loggers, *loggers]
        return [*first, *last]

    def finalize(self) -> None:
        """Closes the run's loggers, before they are detached."""
        for logger in self._loggers:
            logger.finalize("success")

    def detach(self, trainer: L.Trainer, *, keep: bool = False) -> None:
        """The fit is over: what comes after it writes nothing into the run directory.

        `keep`: evaluations of the same trainer draw from the same loaders, and ask for the best checkpoint.
        """
        self.stops.end()
        self.exact.end()
        self._unwatch()
        saved, self.checkpoints = self.checkpoints, None
        self._session = self.recorder = self.monitors = None
        if self._hides:
            warnings.filters = [one for one in warnings.filters if one != _ADVICE]
            self._hides = False
        while self._undo:
            self._undo.pop()()
        give_output_back()
        first = [self.averages, self] if keep else []
        last = [saved] if keep and saved is not None else []
        vars(trainer)["callbacks"] = [*first, *_of_others(trainer), *last]
        trainer.loggers = [logger for logger in trainer.loggers if logger not in self._loggers]

    def _loader_made(self, loader: object) -> None:
        if self.recorder is not None:
            self.stops.keep_workers(loader)

    def _restored(self, state: Mapping[str, Any]) -> None:
        if self.checkpoints is not None:
            self.checkpoints.restored(state)

    # -- between two steps

    def before_epoch(self, trainer: L.Trainer) -> None:
        """Nothing of the next epoch has begun, and all of the last one is over."""
        self.exact.before_epoch(trainer)
        with self.exact.at("between"):
            if self.checkpoints is not None:
                self.checkpoints.before_epoch(trainer)
            self.stops.boundary(trainer, between_epochs=True)

    def after_batch(self, trainer: L.Trainer, validation_due: bool) -> None:
        """A batch is trained on and logged; the validation behind it has not begun."""
        self.exact.where = "batch"
        if self.checkpoints is not None:
            self.checkpoints.after_batch(trainer)
        self.stops.after_batch(trainer)
        if self.checkpoints is not None and validation_due:
            self.exact.hold(trainer)
            self.stops.before_validation(trainer)
        self.exact.where = None

    def after_validation(self, trainer: L.Trainer) -> None:
        """Everything that belongs to a batch is done."""
        self.exact.after_validation()
        if self.checkpoints is not None:
            self.checkpoints.after_validation(trainer)
        self._at("data")

    def loaders_made(self, trainer: L.Trainer) -> None:
        """The training's loaders are there."""
        if self.recorder is not None:
            self.even.loaders_made(trainer)

    def is_over(self, empty: bool) -> bool:
        """Whether no batch comes where the next would; `empty`: this rank has none."""
        return self.recorder is not None and self.even.is_over(empty)

    def check_state(self, trainer: L.Trainer) -> bool:
        """Before a save: raises if replicas differ; returns whether all weights are finite."""
        self.replicas.compare(trainer)
        return self.finite.check_weights(trainer)

    def _at(self, part: str) -> None:
        """Which part of a step begins; passes of a manual optimization are all `compute`."""
        if self.recorder is not None:
            self.recorder.session.at("compute" if self._by_hand and part in _PASSES else part)

    # -- Lightning's hooks, before the user's callbacks

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """The ranks are connected; no loader is made."""
        if not self._barebones:
            self._unwatch()  # what a fit that raised has left
            self.exact.setup(trainer, pl_module, stage)
            self._unwatch = compat.watch_boundaries(trainer, self.exact, self) if stage == "fit" else _nothing
        lend_all_reduce(pl_module)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The model is wrapped, its weights are loaded."""
        self.exact.fit_starts(trainer)
        if self.recorder is not None:
            self.trainable.fit_starts(trainer)

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reshards the model, as after a validation."""
        if self.recorder is not None:
            reshard(pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The loaders are there, and what a checkpoint holds of optimizers and schedules is restored."""
        self.exact.training_starts(trainer)
        self.batch.apply(trainer)
        if self.recorder is None:
            return
        self._by_hand = not pl_module.automatic_optimization
        wrapped = trainer.strategy.model
        loaders = _loaders(trainer)
        measure_steps(
            self.recorder.session, lambda: (wrapped,), lambda: loaders[0] if loaders else None, self._say or print
        )
        if self.samples is not None:
            workers = max((int(getattr(one, "num_workers", 0)) for one in _loaders(trainer)), default=0)
            self.samples.begin(self._session, workers)
        self.finite.training_starts(trainer)
        self.replicas.training_starts(trainer)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, *_: Any) -> None:
        """From here on the state is incomplete."""
        self._at("forward")
        self.exact.before_batch(trainer)
        if self.recorder is None:
            return
        self.even.before_batch(trainer)
        if self.samples is not None and self.samples.saw(batch):
            self.samples.compare(data_rank(trainer), _loaders(trainer))

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """The loss is computed."""
        self._at("backward")
        if self.recorder is not None:
            self.finite.before_backward(trainer, loss)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The gradients are computed."""
        self._at("optimizer")
        if self.recorder is not None:
            self.trainable.after_backward(trainer)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        """The gradients are unscaled, and not clipped yet."""
        if self.recorder is not None:
            self.finite.before_optimizer_step(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """The optimizers have stepped."""
        self._at("logging")
        if self.recorder is not None:
            self.finite.after_batch(trainer)
            self.replicas.after_batch(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compares the samples now if the epoch was too short to do it earlier."""
        if self.recorder is not None and self.samples is not None:
            self.samples.compare(data_rank(trainer), _loaders(trainer))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reshards the model, so that the hooks that follow find the optimizer's parameters in it."""
        if self.recorder is not None:
            reshard(pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The training has reached its limits."""
        if self.recorder is not None:
            self.finite.training_ends(trainer)
            self.replicas.compare(trainer)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restores the state of a run that had nothing left to train."""
        self.exact.fit_ends(trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Removes rank 0's loader state from any checkpoint, also from one that the user's code writes."""
        self.exact.correct(checkpoint)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Lightning calls no `teardown` then."""
        self.exact.on_exception(trainer)
        take_all_reduce_back(pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leaves everything as it was."""
        self._unwatch()
        self._unwatch = _nothing
        self.exact.uninstall()
        self.even.end()
        self.trainable.end()
        take_all_reduce_back(pl_module)


@compat.only_its_own_batch_hooks
class LastCallback(L.Callback):
    """What comes behind the user's callbacks: a state that they may still change is saved, the end is recorded.

    A stop is carried out last, when all others have had their say. Without a recorder it does nothing, but that the
    checkpoints of a finished run can be loaded.
    """

    def __init__(self, fit: FitCallback) -> None:
        self._fit = fit

    def _beat(self, trainer: L.Trainer, phase: str) -> None:
        if self._fit.recorder is not None:
            self._fit.recorder.beat(trainer, phase)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """The ranks are connected, also those that Lightning has started."""
        fit = self._fit
        if fit.recorder is not None:
            fit.recorder.connected(trainer)
            fit.stuck.connected(trainer)
            fit.stops.connected(trainer)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The model is there and its weights are loaded; the state of the loops comes next."""
        if self._fit.checkpoints is not None:
            self._fit.checkpoints.fit_starts(trainer)
        self._beat(trainer, "restore")
        self._fit.stops.boundary(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Everything is restored; the first epoch is next."""
        fit = self._fit
        if fit.checkpoints is not None:
            fit.checkpoints.training_starts(trainer)
        if fit.recorder is not None:
            assert fit.monitors is not None
            fit.monitors.training_starts(trainer)
            fit.recorder.session.begin(step=trainer.global_step, epoch=trainer.current_epoch)
            if (samples := fit.batch.samples(trainer)) is not None:
                fit.recorder.session.batch_is(samples)
            fit.stops.training_starts(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The loaders' workers start, and the first batch is waited for."""
        if self._fit.monitors is not None:
            self._fit.monitors.epoch_starts(trainer)
        self._beat(trainer, "first-batch")

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """A save is over."""
        recorder = self._fit.recorder
        if recorder is not None and recorder.session.phase == "save":
            recorder.beat(trainer, "train")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """One more batch."""
        self._beat(trainer, "train")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Validation, or the sanity check before training."""
        if self._fit.checkpoints is not None:
            self._fit.checkpoints.validation_starts(trainer)
        self._beat(trainer, "sanity" if trainer.sanity_checking else "validate")
        self._fit.stops.validation_starts(trainer)

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """A stop may come here; none between the micro-batches of a step, where nothing can be saved."""
        if not self._fit.exact.in_window(trainer):
            self._fit.stops.after_validation_batch(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Back from a validation."""
        if self._fit.checkpoints is not None:
            self._fit.checkpoints.validation_ends(trainer)
        if self._fit.monitors is not None:
            self._fit.monitors.validation_ends(trainer)
        self._beat(trainer, "train")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is being written, until the next batch."""
        self._beat(trainer, "save")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """All that belongs to the epoch is logged."""
        if self._fit.checkpoints is not None:
            self._fit.checkpoints.epoch_ends(trainer)
        if self._fit.recorder is not None:
            self._fit.recorder.epoch_ends(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The result is there."""
        if self._fit.checkpoints is not None:
            self._fit.checkpoints.training_ends(trainer)
        if self._fit.monitors is not None:
            self._fit.monitors.training_ends(trainer)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The limits of the job were reached, and the last checkpoint is durable."""
        fit = self._fit
        if fit.checkpoints is not None:
            fit.checkpoints.fit_ends(trainer)
        if fit.recorder is not None:
            fit.recorder.fit_ends(trainer)
            fit.stuck.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """The fit is left: what was raised is recorded, and a stop is carried out."""
        fit = self._fit
        if fit.recorder is None:
            return
        fit.recorder.record_exception(trainer, exception)
        fit.stuck.left_by(exception)
        if isinstance(exception, StopRequested):
            fit.stops.carry_out(exception)


def _nothing() -> None:
    """Nothing is to be undone."""


def _of_others(trainer: L.Trainer) -> list[L.Callback]:
    ours = (AverageOverRanks, FitCallback, LastCallback, Checkpoints)
    return [one for one in callbacks_of(trainer) if not isinstance(one, ours)]


def _loaders(trainer: L.Trainer) -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    return list(combined.flattened) if combined is not None else []


_PASSES: Final = ("forward", "backward", "optimizer")
_ADVICE: Final = ("ignore", None, PossibleUserWarning, None, 0)
"""What `warnings.simplefilter` makes for Lightning's advice."""
_SAMPLES: Final = (
    "a map-style dataset gets a sampler by itself (trainer.use_distributed_sampler); an IterableDataset\n"
    "has to skip what others read: by torch.utils.data.get_worker_info() and torch.distributed.get_rank(), or\n"
    "datasets.distributed.split_dataset_by_node(dataset, rank, world_size).\n"
    "Data that repeat on purpose: trainer.check_samples: false"
)
