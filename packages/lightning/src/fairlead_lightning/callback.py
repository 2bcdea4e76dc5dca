"""`Fairlead`: one callback that gives an unmodified `train.py` a run directory and resume."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as L
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from fairlead.config import CheckpointConfig, RunConfig, TrainerConfig
from fairlead.config_bases import RequeueConfigBase
from fairlead.interfaces import BuildContext, Setting, StopGuard
from fairlead.open_union import parse_backend
from fairlead.plugins import PluginManager, default_plugins
from fairlead.resolve import Resolution, resolve
from fairlead_distributed.run.opening import open_session
from fairlead_distributed.run.session import RunSession
from fairlead_lightning import compat
from fairlead_lightning.build import build_backend
from fairlead_lightning.checkpoint.checkpoints import Checkpoints
from fairlead_lightning.checkpoint.committing import copies_of
from fairlead_lightning.lifecycle.recorder import Recorder
from fairlead_lightning.lifecycle.stops import Stops
from fairlead_lightning.lifecycle.stuck import StuckRanks
from fairlead_lightning.metrics.metrics_file import METRICS_FILE, MetricsFile
from fairlead_lightning.resume.averages import AverageOverRanks
from fairlead_lightning.resume.exact_resume import ExactResume, saved_positions
from fairlead_lightning.resume.seen import uncut_loggers
from fairlead_runs.batch_policy import batch_plan
from fairlead_runs.describe import described

__all__ = ["Fairlead"]

_PARTS = (AverageOverRanks, ExactResume, Checkpoints, Recorder, StuckRanks, Stops)


class Fairlead(L.Callback):
    """Gives `trainer.fit` of an unmodified Lightning Trainer a run directory, durable checkpoints and resume.

    Started again, the script resumes from the newest complete checkpoint of the run; the
    `ckpt_path` of `fit` is used while the run has none of its own.  What belongs to the Trainer
    itself (strategy, devices, precision, environment) stays as the script has it.  The script's own
    loggers and callbacks, a ModelCheckpoint too, work as before.

    Args:
        run: The run directory, as `runs/digits`, or a `RunConfig`; None: `runs/<name of the script>`.
        checkpoint: When to save and what to keep; None: the defaults of `CheckpointConfig`.
        requeue: Who starts the job again after a stop, as `trainer.requeue`; `auto`: the scheduler of this job.
        batch_policy: What stays the same when the run goes on with another number of ranks; see `TrainerConfig`.
        environ: The environment variables; None: this process's.
        plugins: The plugin manager; None: the plugins installed here.
        guard: What stops the fit on a signal, with handlers that are installed already, as where the fit is not in
            the main thread; None: made from `requeue`.

    Example:
        >>> import lightning.pytorch as L
        >>> from fairlead import Fairlead
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[Fairlead(run="runs/digits")])  # doctest: +SKIP
        >>> trainer.fit(model, loader)  # doctest: +SKIP
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | RunConfig | None = None,
        *,
        checkpoint: CheckpointConfig | None = None,
        requeue: RequeueConfigBase | Mapping[str, Any] | str = "auto",
        batch_policy: Literal["keep_global", "keep_per_device"] | None = None,
        environ: Mapping[str, str] | None = None,
        plugins: PluginManager | None = None,
        guard: StopGuard | None = None,
    ) -> None:
        if isinstance(run, RunConfig):
            self.run = run
        elif run is None:
            self.run = RunConfig(seed=None)
        else:
            path = Path(run)
            self.run = RunConfig(name=path.name, dir=str(path.parent), seed=None)
        self.checkpoint = checkpoint or CheckpointConfig()
        self.batch_policy = batch_policy
        self.session: RunSession | None = None
        self._environ = os.environ if environ is None else environ
        self.exact = ExactResume(environ=self._environ)
        self._plugins = plugins
        plugins = plugins if plugins is not None else default_plugins()
        self._config = TrainerConfig.model_validate({"requeue": requeue}, context={"plugins": plugins})
        resolution = resolve(self._config, environ=self._environ, plugins=plugins)
        self.stuck = StuckRanks(self._environ)
        self.stops = Stops(resolution.requeue, BuildContext(resolution, self._environ, plugins), _say, guard)
        self.stops.listen_early()
        self._accumulate: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A plugin manager cannot be pickled; ranks that are spawned make their own."""
        return {**self.__dict__, "_plugins": None, "_environ": dict(self._environ)}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Opens the run when a fit begins; the ranks are connected by then, and nothing is restored yet."""
        if stage != "fit":
            return
        plugins = self._plugins if self._plugins is not None else default_plugins()
        resolution = _as_seen(trainer, self._environ, plugins, self._config, self.batch_policy)
        datamodule = getattr(trainer, "datamodule", None)  # set by Lightning when the fit begins
        job = {
            "run": self.run.model_dump(mode="json"),
            "model": described(pl_module),
            "data": described(datamodule) if datamodule is not None else None,
            "trainer": _trainer_settings(trainer),
        }
        self._detach(trainer)  # what a fit that raised has left
        copies = copies_of(getattr(trainer.strategy, "checkpoint_io", None))
        session = open_session(job, resolution, self.run, environ=self._environ, copies=copies)
        self.session = session
        if session.finished:
            trainer.print(f"{session.path} is finished: {session.finished}")
            if session.checkpoint is not None:  # Lightning sees that the limits are reached and trains no further
                compat.resume_from(trainer, session.checkpoint)
                self._attach(trainer, Checkpoints(self.checkpoint, session, self.exact))
                self.exact.setup(trainer, pl_module, stage)
            return
        for message in session.messages:
            trainer.print(message)
        io = getattr(trainer.strategy, "checkpoint_io", None)
        if isinstance(io, AsyncCheckpointIO):
            trainer.print("AsyncCheckpointIO is not used: it does not say when a file is complete and may be committed")
        if type(io) is TorchCheckpointIO or isinstance(io, AsyncCheckpointIO):
            backend = parse_backend("checkpoint_io", "torch", plugins)
            context = BuildContext(resolution, self._environ, plugins)
            trainer.strategy.checkpoint_io = build_backend(backend, context)
        if session.checkpoint is not None:
            compat.resume_from(trainer, session.checkpoint)
        self._accumulate = trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches = batch_plan(resolution, session.previous).accumulate_grad_batches
        if session.resumed and (theirs := uncut_loggers(trainer.loggers)):
            names = ", ".join(theirs)
            trainer.print(f"{names}: not cut back, steps that are done again are in it twice; metrics.csv is right")
        position = saved_positions(session).get(METRICS_FILE)
        own = MetricsFile(session.path, resume_step=session.resume_step, position=position)
        trainer.loggers = [*trainer.loggers, own]
        recorder, averages = Recorder(session), AverageOverRanks()
        self.stuck.session = session
        self._attach(trainer, Checkpoints(self.checkpoint, session, self.exact), recorder, self.stuck, self.stops)
        vars(trainer)["callbacks"].insert(0, averages)
        self.exact.stops, self.stops.saves = self.stops, self.exact.saves
        self.stops.begin(session)
        for part in (recorder, averages, self.exact, self.stuck, self.stops):
            part.setup(trainer, pl_module, stage)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Releases the run directory."""
        if stage == "fit" and self.session is not None:
            for logger in trainer.loggers:
                if isinstance(logger, MetricsFile):
                    logger.finalize("success")  # Lightning finalizes what is still attached after this hook
            self.stops.end()
            self.session.close()
            self._detach(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Releases the run directory, after the parts, which come first, have saved and recorded what they want to."""
        self.stops.end()
        if self.session is not None:
            self.session.close()

    def _attach(self, trainer: L.Trainer, saves: Checkpoints, *records: L.Callback) -> None:
        # Last, and in this order: what a checkpoint holds of the other callbacks is their newest state.
        others = [callback for callback in _callbacks(trainer) if callback is not self]
        self.exact.session, self.exact.saves, self.exact.stops = self.session, saves, None
        vars(trainer)["callbacks"] = [self.exact, *others, saves, *records, self]

    def _detach(self, trainer: L.Trainer) -> None:
        """Takes the parts of an ended fit away; what comes after it writes nothing into the run directory."""
        trainer.loggers = [logger for logger in trainer.loggers if not isinstance(logger, MetricsFile)]
        vars(trainer)["callbacks"] = [c for c in _callbacks(trainer) if not isinstance(c, _PARTS)]
        if self._accumulate is not None:
            trainer.accumulate_grad_batches = self._accumulate


@rank_zero_only
def _say(text: str) -> None:
    print(text, flush=True)


def _callbacks(trainer: L.Trainer) -> list[L.Callback]:
    attached: list[L.Callback] = vars(trainer)["callbacks"]  # set by Lightning without a declaration
    return attached


def _as_seen(
    trainer: L.Trainer,
    environ: Mapping[str, str],
    plugins: PluginManager,
    config: TrainerConfig,
    batch_policy: Literal["keep_global", "keep_per_device"] | None,
) -> Resolution:
    """The resolution of this machine, corrected to what the script's own Trainer has decided."""
    resolution = resolve(config, environ=environ, plugins=plugins)
    why = "the script's own Trainer"
    seen = {
        "world_size": trainer.world_size,
        "num_nodes": trainer.num_nodes,
        "devices": trainer.num_devices,
        "global_rank": trainer.global_rank,
        "local_rank": trainer.local_rank,
        "node_rank": trainer.node_rank,
        "strategy": type(trainer.strategy).__name__,
        "precision": trainer.precision,
        "accelerator": type(trainer.accelerator).__name__,
    }
    return dataclasses.replace(
        resolution,
        settings={**resolution.settings, **{name: Setting(value, why) for name, value in seen.items()}},
        world_size=trainer.world_size,
        num_nodes=trainer.num_nodes,
        devices=trainer.num_devices,
        trainer=TrainerConfig(accumulate_grad_batches=trainer.accumulate_grad_batches, batch_policy=batch_policy),
    )


def _trainer_settings(trainer: L.Trainer) -> dict[str, Any]:
    """What identifies the run among the Trainer's own settings; the rest may change on a resume."""
    return {
        "max_steps": trainer.max_steps,
        "max_epochs": trainer.max_epochs,
        "precision": str(trainer.precision),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
    }
