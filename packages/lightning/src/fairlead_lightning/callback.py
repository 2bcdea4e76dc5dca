"""`Fairlead`: one callback that gives an unmodified `train.py` a run directory and resume."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.fabric.plugins import TorchCheckpointIO

from fairlead.commit import newest_complete
from fairlead.config import CheckpointConfig, RunConfig, TrainerConfig
from fairlead.interfaces import BuildContext, Setting
from fairlead.open_union import parse_backend
from fairlead.plugins import PluginManager, default_plugins
from fairlead.resolve import Resolution, resolve
from fairlead_lightning import _lightning_compat as compat
from fairlead_lightning.build import build_backend
from fairlead_lightning.checkpoints import Checkpoints, CommittingIO
from fairlead_lightning.describe import described
from fairlead_lightning.metrics import MetricsFile
from fairlead_lightning.recorder import Recorder
from fairlead_lightning.session import STATE_FILE, RunSession, open_session

__all__ = ["Fairlead"]


class Fairlead(L.Callback):
    """Gives `trainer.fit` of an unmodified Lightning Trainer a run directory, durable checkpoints and resume.

    Started again, the script goes on from the newest complete checkpoint of the run; the
    `ckpt_path` of `fit` is used while the run has none of its own.  What belongs to the Trainer
    itself (strategy, devices, precision, environment) stays as the script has it.

    Args:
        run: The run directory, as `runs/digits`, or a `RunConfig`; None: `runs/<name of the script>`.
        checkpoint: When to save and what to keep; None: the defaults of `CheckpointConfig`.
        environ: The environment variables; None: this process's.
        plugins: The plugin manager; None: the plugins installed here.

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
        environ: Mapping[str, str] | None = None,
        plugins: PluginManager | None = None,
    ) -> None:
        if isinstance(run, RunConfig):
            self.run = run
        elif run is None:
            self.run = RunConfig(seed=None)
        else:
            path = Path(run)
            self.run = RunConfig(name=path.name, dir=str(path.parent), seed=None)
        self.checkpoint = checkpoint or CheckpointConfig()
        self.session: RunSession | None = None
        self._environ = os.environ if environ is None else environ
        self._plugins = plugins
        self._parts: list[L.Callback] = []

    def __getstate__(self) -> dict[str, Any]:
        """A plugin manager cannot be pickled; ranks that are spawned make their own."""
        return {**self.__dict__, "_plugins": None, "_environ": dict(self._environ)}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Opens the run when a fit begins; the ranks are connected by then, and nothing is restored yet."""
        if stage != "fit":
            return
        plugins = self._plugins if self._plugins is not None else default_plugins()
        resolution = _as_seen(trainer, self._environ, plugins)
        datamodule = getattr(trainer, "datamodule", None)  # set by Lightning when the fit begins
        job = {
            "run": self.run.model_dump(mode="json"),
            "model": described(pl_module),
            "data": described(datamodule) if datamodule is not None else None,
            "trainer": _trainer_settings(trainer),
        }
        session = open_session(job, resolution, self.run, environ=self._environ)
        self.session = session
        if session.finished:
            newest = newest_complete(session.path / "checkpoints").checkpoint
            if newest is not None:  # Lightning sees that the limits are reached and trains no further
                compat.resume_from(trainer, newest.path / STATE_FILE)
            trainer.print(f"{session.path} is finished: {session.finished}")
            return
        for message in session.messages:
            trainer.print(message)
        if type(getattr(trainer.strategy, "checkpoint_io", None)) is TorchCheckpointIO:
            backend = parse_backend("checkpoint_io", "torch", plugins)
            trainer.strategy.checkpoint_io = CommittingIO(build_backend(backend, BuildContext(resolution, self._environ, plugins)))
        if session.checkpoint is not None:
            compat.resume_from(trainer, session.checkpoint)
        trainer.loggers = [*trainer.loggers, MetricsFile(session.path, resume_step=session.resume_step)]
        self._parts = [Recorder(session), Checkpoints(self.checkpoint, session)]
        for part in self._parts:
            part.setup(trainer, pl_module, stage)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Releases the run directory."""
        if stage == "fit" and self.session is not None:
            self.session.close()
            trainer.loggers = [logger for logger in trainer.loggers if not isinstance(logger, MetricsFile)]
            self._parts = []

    # Each hook goes to the parts in order: what is recorded first, then what is saved.

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See `Checkpoints`."""
        for part in self._parts:
            part.on_fit_start(trainer, pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See `Recorder` and `Checkpoints`."""
        for part in self._parts:
            part.on_train_start(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """See `Recorder` and `Checkpoints`."""
        for part in self._parts:
            part.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See `Recorder`."""
        for part in self._parts:
            part.on_validation_start(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See `Recorder` and `Checkpoints`."""
        for part in self._parts:
            part.on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See `Checkpoints`."""
        for part in self._parts:
            part.on_train_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See `Checkpoints`."""
        for part in self._parts:
            part.on_train_end(trainer, pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See `Recorder`."""
        for part in self._parts:
            part.on_fit_end(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Saves on SIGTERM, ends this start in the history, and releases the run directory."""
        for part in reversed(self._parts):
            part.on_exception(trainer, pl_module, exception)
        if self.session is not None:
            self.session.close()


def _as_seen(trainer: L.Trainer, environ: Mapping[str, str], plugins: PluginManager) -> Resolution:
    """The resolution of this machine, corrected to what the script's own Trainer has decided."""
    resolution = resolve(TrainerConfig(), environ=environ, plugins=plugins)
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
        trainer=TrainerConfig(accumulate_grad_batches=trainer.accumulate_grad_batches),
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
