"""`Fairlead`: one callback that gives an unmodified `train.py` a run directory and resume."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import lightning.pytorch as L
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from fairlead.backends import build_backend
from fairlead.config import CheckpointConfig, RunConfig, TrainerConfig
from fairlead.config_bases import RequeueConfigBase
from fairlead.errors import ConfigError
from fairlead.interfaces import BuildContext
from fairlead.open_union import parse_backend
from fairlead.plugins import PluginManager, default_plugins
from fairlead.resolve import resolve
from fairlead.validation import validated
from fairlead_distributed.run.commits import copies_of
from fairlead_distributed.run.opening import open_session
from fairlead_distributed.run.scripts import advice_for_scripts, described_job, run_config
from fairlead_distributed.run.session import RunSession
from fairlead_launch.prove.plan import instructions_in
from fairlead_lightning import compat
from fairlead_lightning.display.quiet import hush
from fairlead_lightning.fit import as_seen_by, callbacks_of, run_loggers
from fairlead_lightning.fit_callback import FitCallback
from fairlead_lightning.loggers.of_scripts import continue_loggers
from fairlead_lightning.resume.exact_resume import uncut_loggers
from fairlead_lightning.resume.rank_state import saved_positions
from fairlead_lightning.resume.users import owners_of_fit
from fairlead_lightning.trainer import Trainer
from fairlead_runs.batch_size import batch_plan
from fairlead_runs.describe import described
from fairlead_runs.guard import StopGuard


class Fairlead(L.Callback):
    """Gives `trainer.fit` of an unmodified Lightning Trainer a run directory, durable checkpoints and resume.

    Started again, the script resumes from the newest complete checkpoint of the run; the
    `ckpt_path` of `fit` is used while the run has no checkpoint yet.  What belongs to the Trainer
    itself (strategy, devices, precision, environment) stays as the script has it.  The script's own
    loggers and callbacks, a ModelCheckpoint too, work as before.

    Args:
        run: The run directory, as `runs/digits`, or a `RunConfig`; None: `runs/<name of the script>`.
        checkpoint: When to save and what to keep; None: the defaults of `CheckpointConfig`.
        requeue: Who restarts the job after a stop, as `trainer.requeue`; `auto`: the scheduler of this job.
        loggers: Where what is logged goes besides the script's own loggers, as in a job's `trainer`: `["prometheus"]`.
        max_non_finite: When a loss that is no number ends the training, as failed; see `TrainerConfig`.
        check_divergence_every_n_steps: Compare the model of all ranks so often too; see `TrainerConfig`.
        on_divergence: What to do where the ranks hold different models; see `TrainerConfig`.
        local_buffers: Buffers that differ over the ranks on purpose; see `TrainerConfig`.
        check_samples: Warn if ranks or workers train on the same samples; see `TrainerConfig`.
        batch_policy: What stays the same when the run continues with another number of ranks; see `TrainerConfig`.
        base_batch_size: The global batch for which the learning rates of `configure_optimizers` were chosen: they
            follow that of this start; see `TrainerConfig`.
        lr_rule: How they follow it; None: `linear`.
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
        checkpoint: CheckpointConfig | Mapping[str, Any] | None = None,
        requeue: RequeueConfigBase | Mapping[str, Any] | str = "auto",
        loggers: Sequence[Any] = (),
        max_non_finite: int | None = 10,
        check_divergence_every_n_steps: int | None = None,
        on_divergence: Literal["error", "warning", "ignore"] = "error",
        local_buffers: Sequence[str] = (),
        check_samples: bool = True,
        batch_policy: Literal["keep_global", "keep_per_device"] | None = None,
        base_batch_size: int | None = None,
        lr_rule: Literal["linear", "sqrt", "none"] | None = None,
        environ: Mapping[str, str] | None = None,
        plugins: PluginManager | None = None,
        guard: StopGuard | None = None,
    ) -> None:
        hush()  # before the script's Trainer is made, which advertises
        self.run = run_config(run)
        self.batch_policy = batch_policy
        self.session: RunSession | None = None
        self._environ = os.environ if environ is None else environ
        self._plugins = plugins
        plugins = plugins if plugins is not None else default_plugins()
        self._config = validated(
            TrainerConfig,
            {
                "requeue": requeue if instructions_in(self._environ) is None else "none",
                "loggers": loggers,
                "checkpoint": checkpoint or {},
                "max_non_finite": max_non_finite,
                "check_divergence_every_n_steps": check_divergence_every_n_steps,
                "on_divergence": on_divergence,
                "local_buffers": local_buffers,
                "check_samples": check_samples,
                "base_batch_size": base_batch_size,
                "lr_rule": lr_rule,
                "batch_policy": batch_policy,
            },
            type(self).__name__,
            plugins,
        )
        resolution = resolve(self._config, environ=self._environ, plugins=plugins)
        self._fit = FitCallback(BuildContext(resolution, self._environ, plugins), guard=guard)
        self._fit.stops.listen_early()
        self._accumulate: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A plugin manager cannot be pickled; ranks that are spawned make their own."""
        return {**self.__dict__, "_plugins": None, "_environ": dict(self._environ)}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Opens the run when a fit begins; the ranks are connected by then, and nothing is restored yet."""
        if stage != "fit":
            return
        if isinstance(trainer, Trainer) or sum(isinstance(one, Fairlead) for one in callbacks_of(trainer)) > 1:
            raise ConfigError(
                "this fit has a run already: two would resume it",
                where="Trainer, callbacks",
                fix="give one callback Fairlead; and none to Fairlead's own Trainer, which takes run=RunConfig(...)",
            )
        self._detach(trainer)  # what a fit that raised has left
        plugins = self._plugins if self._plugins is not None else default_plugins()
        resolution = resolve(self._config, environ=self._environ, plugins=plugins)
        batch = TrainerConfig(accumulate_grad_batches=trainer.accumulate_grad_batches, batch_policy=self.batch_policy)
        resolution = as_seen_by(trainer, resolution, batch)
        data = getattr(trainer, "datamodule", None)  # set by Lightning when the fit begins
        data = described(data) if data is not None else None
        job = described_job(self.run, described(pl_module), data, _trainer_settings(trainer, self._config))
        copies = copies_of(getattr(trainer.strategy, "checkpoint_io", None))
        with advice_for_scripts():
            session = open_session(job, resolution, self.run, environ=self._environ, copies=copies)
        self.session = session
        if session.proof is not None:
            trainer.log_every_n_steps = 1  # type: ignore[attr-defined]  # to see the first step that differs
            session.proof.watch(partial(owners_of_fit, trainer))
        loggers: list[Logger] = []
        if session.finished is None:
            for message in session.messages:
                trainer.print(message)
            _commit_checkpoints(trainer, BuildContext(resolution, self._environ, plugins))
            self._accumulate = trainer.accumulate_grad_batches
            trainer.accumulate_grad_batches = batch_plan(resolution, session.previous)
            continue_loggers(trainer.loggers, saved_positions(session), session.resume_step)
            if session.resumed and (uncut := uncut_loggers(trainer.loggers)):
                names = ", ".join(uncut)
                trainer.print(f"{names}: not cut back, so repeated steps are in it twice; metrics.csv is correct")
            loggers = run_loggers(session, BuildContext(resolution, self._environ, plugins))
        else:
            trainer.print(f"{session.path} is finished: {session.finished}")
            if session.checkpoint is None:
                return
        if session.checkpoint is not None:  # of a finished run: Lightning sees its limits, and trains no further
            compat.resume_from(trainer, session.checkpoint)
        attached = self._fit.attach(trainer, session, self._config.checkpoint, loggers)
        # Last: the run is closed when all others have had their say.
        vars(trainer)["callbacks"] = [*(c for c in callbacks_of(trainer) if c is not self), self]
        for part in attached:
            part.setup(trainer, pl_module, stage)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Releases the run directory."""
        if stage == "fit" and self.session is not None:
            self._fit.finalize()  # Lightning finalizes what is still attached after this hook
            self._detach(trainer)
            self.session.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Releases the run directory; this callback is the last, so that everything is saved and recorded."""
        self._fit.stops.end()
        if self.session is not None:
            self.session.close()

    def _detach(self, trainer: L.Trainer) -> None:
        self._fit.detach(trainer)
        if self._accumulate is not None:
            trainer.accumulate_grad_batches = self._accumulate


def _commit_checkpoints(trainer: L.Trainer, context: BuildContext) -> None:
    """Replaces Lightning's own backend by one that says when a file is complete."""
    io = getattr(trainer.strategy, "checkpoint_io", None)
    if isinstance(io, AsyncCheckpointIO):
        trainer.print("AsyncCheckpointIO is not used: it does not say when a file is complete and may be committed")
    if type(io) is TorchCheckpointIO or isinstance(io, AsyncCheckpointIO):
        backend = parse_backend("checkpoint_io", "torch", context.plugins)
        trainer.strategy.checkpoint_io = build_backend(backend, context)


def _trainer_settings(trainer: L.Trainer, config: TrainerConfig) -> dict[str, Any]:
    """What identifies the run among the Trainer's own settings and ours; the rest may change on a resume."""
    names = ("max_steps", "max_epochs", "accumulate_grad_batches", "gradient_clip_val")
    own = {"base_batch_size": config.base_batch_size, "lr_rule": config.lr_rule} if config.base_batch_size else {}
    return {"precision": str(trainer.precision), **{name: getattr(trainer, name) for name in names}, **own}
