"""`LoopRun`: a run directory and exact resume for a loop of one's own on a Lightning Fabric."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeVar

import lightning.fabric as lf
from torch.utils.data import DataLoader

from fairlead.config import CheckpointConfig, RunConfig
from fairlead.errors import ConfigError, RunDirectoryError
from fairlead.plugins import PluginManager
from fairlead_distributed.run.session import RunSession
from fairlead_lightning.custom_loop.batches import LoopBatches
from fairlead_lightning.custom_loop.loading import load_checkpoint
from fairlead_lightning.custom_loop.opening import open_loop
from fairlead_lightning.custom_loop.saving import LoopCheckpoints
from fairlead_lightning.custom_loop.state import LoopState
from fairlead_lightning.display.output import give_output_back, keep_output
from fairlead_lightning.fit import run_config
from fairlead_lightning.guard import StopGuard
from fairlead_lightning.lifecycle.stuck import StuckRanks
from fairlead_lightning.loggers.positions import LOGGER_POSITIONS, logger_positions, resume_position
from fairlead_lightning.metrics.metrics_file import MetricsFile
from fairlead_lightning.resume.loading import load_weights
from fairlead_runs.data_ranks import replicas_of

T = TypeVar("T")

_THE_LOOPS_OWN: Final = {"every_n_steps", "every_n_epochs", "every_n_minutes", "on_validation", "save_weights_only"}


class LoopRun:
    """A run directory, durable checkpoints and exact resume for a loop of one's own.

    Started again, the script resumes from the newest complete checkpoint as if it had not been interrupted: with the
    same weights, bit for bit.  For that the loop

    - gives all that changes while it trains: modules, optimizers, schedulers, the sampler, plain data;
    - takes its batches from `batches()`, and counts its optimizer steps in `step`;
    - calls `save()` as the last thing of a step, never between the micro-batches of one.

    All ranks call `restore`, `save` and `finish` alike.  A rank's random generators (Python, NumPy, torch, CUDA) and
    the gradient scaler are in each checkpoint without being given.

    Args:
        fabric: The Fabric, launched: `fabric(config)`'s or any other.
        run: The run directory, as `runs/digits`, or a `RunConfig`; None: `runs/<name of the script>`.
        config: What makes this run this run, as plain data: with another value of anything in it the run is not gone
            on with.  `max_steps`, `max_epochs` and whatever else may change in a job file's `trainer` may change here.
        checkpoint: What to keep (`monitor`, `mode`, `keep_last`, `keep_best`, `keep_every_n_steps`); None: the two
            newest, and the best by `val/loss` or `val_loss`.
        finite: Whether a weight that is no number ends the run, as failed, in place of being saved.
        per_rank: Objects and plain data that differ from rank to rank, such as a loader with a state of its own.
        batch_policy: What stays the same when the run goes on with another number of ranks; see `TrainerConfig`.
        environ: The environment variables; None: this process's.
        plugins: The plugin manager; None: the plugins installed here.
        state: The same on all ranks, by name: what `fabric.setup` returned, anything with `state_dict` and
            `load_state_dict`, and plain data, which are then read and set in `state`.

    Attributes:
        state: What was given, by name; plain data are changed here: `run.state["best"] = 0.5`.
        per_rank: The same for this rank's own.
        epoch: The epoch that the loop is in, from 0, for `metrics.csv` and the record.
        accumulate_grad_batches: Batches of each rank to one optimizer step: `config["accumulate_grad_batches"]`, or 1;
            another number where the run goes on with other ranks and `batch_policy="keep_global"`.
        finished: How the run ended, when there is nothing left to do; else None.

    Raises:
        ConfigError: An argument is wrong, or the Fabric is not launched.

    Example:
        >>> state = {"model": model, "optimizer": optimizer, "sampler": sampler}  # doctest: +SKIP
        >>> with LoopRun(fab, "runs/digits", **state) as run:  # doctest: +SKIP
        ...     run.restore()
        ...     for run.epoch in range(sampler.epoch, 10):
        ...         for x, y in run.batches(loader):
        ...             loss = train_step(model, optimizer, x, y)
        ...             run.step += 1
        ...             run.log({"train/loss": loss})
        ...             if run.step % 100 == 0:
        ...                 run.save()
        ...     run.finish()
    """

    def __init__(
        self,
        fabric: lf.Fabric,
        run: str | os.PathLike[str] | RunConfig | None = None,
        /,
        *,
        config: Mapping[str, Any] | None = None,
        checkpoint: CheckpointConfig | None = None,
        finite: bool = True,
        per_rank: Mapping[str, Any] | None = None,
        batch_policy: Literal["keep_global", "keep_per_device"] | None = None,
        environ: Mapping[str, str] | None = None,
        plugins: PluginManager | None = None,
        **state: Any,
    ) -> None:
        self.fabric = fabric
        self.epoch = 0
        self.finished: str | None = None
        self.accumulate_grad_batches = 1
        self._objects = LoopState(state, per_rank or {})
        self.state, self.per_rank = self._objects.shared, self._objects.per_rank
        self._open = partial(
            open_loop,
            fabric,
            run_config(run),
            dict(config or {}),
            self.state,
            checkpoint or CheckpointConfig(),
            finite,
            batch_policy,
            environ,
            plugins,
        )
        if checkpoint is not None and (said := checkpoint.model_fields_set & _THE_LOOPS_OWN):
            raise ConfigError(  # rather than not done
                f"{', '.join(sorted(said))}: when to save is the loop's to decide",
                where="LoopRun(checkpoint=...)",
                fix="leave it out, and call run.save() where a checkpoint is due",
            )
        self._step = 0
        self._stuck = StuckRanks(os.environ if environ is None else environ)
        self._session: RunSession | None = None
        self._checkpoints: LoopCheckpoints | None = None
        self._metrics: MetricsFile | None = None
        self._batches = LoopBatches(self._objects, fabric)
        self._restored = False

    def __enter__(self) -> Self:
        if self._session is not None:
            raise ConfigError("a LoopRun is opened once", where="LoopRun", fix="make a new one for another start")
        session, self._checkpoints, self.accumulate_grad_batches = self._open()
        keep_output()
        self._session, self.finished = session, session.finished
        if self.finished is None:
            self._stuck.watch(session, self.fabric.global_rank, self.fabric.local_rank)
        for message in session.messages:
            self.fabric.print(message)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        session = self._opened()
        try:
            if self.finished is None:
                if error is None:
                    session.event("stop", step=self.step, reason="the loop ended without finish()")
                    session.beat("stopped", self.step)
                elif (stop := getattr(error, "outcome", None)) is not None:  # a guard's `StopExit`
                    why = stop.reason
                    fields = {"evidence": why.evidence, "by_scheduler": why.scheduler_requeues, "unsaved": stop.unsaved}
                    session.event("stop", step=self.step, reason=why.why, requeued=stop.requeued, **fields)
                    session.beat("stopped", self.step)
                else:
                    stopped = isinstance(error, (KeyboardInterrupt, SystemExit))
                    session.raised(error, self.step, stopped=stopped)
                if self._checkpoints is not None:
                    self._checkpoints.finish_writes(self.step)
        finally:
            self._stuck.left_by(error)
            if self._metrics is not None:
                self._metrics.finalize("success" if error is None else "failed")
            session.close()
            give_output_back()

    def heed(self, guard: StopGuard) -> None:
        """Has a `PreemptionGuard` look for the switch files SAVE and STOP of this run, too; on all ranks.

        Then `guard.should_save()`, behind `guard.should_stop()`, says where to call `save()`.
        """
        guard.watch_switches(self.path, self._opened().event)

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._opened().path

    @property
    def step(self) -> int:
        """Optimizer steps that are done, over all starts; the loop counts them here: `run.step += 1`."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        if self._session is not None:
            self._session.beat("train", step)

    def restore(self) -> bool:
        """Goes on from the newest complete checkpoint of the run; the random generators come last.

        Call it once, after everything is set up and seeded, and draw nothing between it and the loop. A finished run
        gives its last state as well: its loop finds nothing left to do.

        Returns:
            Whether there was a checkpoint.  Without one nothing is changed.

        Raises:
            CheckpointError: The checkpoint is damaged, or does not fit; some objects may have been loaded already.
        """
        session = self._opened()
        if self._restored:
            raise ConfigError("the run was restored already", where="LoopRun.restore()", fix="call it once")
        file = session.checkpoint
        if self.finished is not None:
            self.fabric.print(f"{session.path} is finished: {self.finished}")
        metadata: Mapping[str, Any] = {}
        entry: Mapping[str, Any] = {}
        if session.weights is not None:
            for name, module in self._objects.modules():
                load_weights(module, session.weights, name)
        if file is not None:
            metadata, entry = load_checkpoint(file, self._objects, self.fabric)
            self.step, self.epoch = int(metadata["step"]), int(metadata["epoch"])
        self._restored = True
        checkpoints = self._checkpoints
        if checkpoints is not None:
            own = file is not None and file.is_relative_to(session.path)
            checkpoints.saved = self.step if own else None
            checkpoints.monitor = checkpoints.monitor or metadata.get("monitor")  # or the best so far would not be kept
            if self.fabric.is_global_zero:
                # Without a position by the step: the rows here count from 1, Lightning's from 0.
                position = resume_position(entry, MetricsFile.position_key) if own else None
                self._metrics = MetricsFile(session.path, self.step + 1 if own else None, position, session.fence)
            session.begin(step=self.step, epoch=self.epoch)
        self._batches.begin()
        return file is not None

    def batches(self, loader: DataLoader[T]) -> Iterator[T]:
        """The loader's batches to the end of the epoch, on this rank's device; each counts as trained on.

        It goes on where the run was interrupted, and takes nothing from the random generators.

        Args:
            loader: A loader over a `ResumableDistributedSampler` of this run, with any number of workers; or a loader
                with a state of its own that was given in `per_rank`.  Not what `fabric.setup_dataloaders` returned.

        Raises:
            ConfigError: The position of this loader is not saved in this run, or the run is not restored yet.
            RunDirectoryError: The run is finished.
        """
        self._require_training("batches()")
        return self._batches.of(loader, self.step)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Adds numbers of this step, or tensors with one element, to rank 0's `metrics.csv` and the loggers."""
        self._require_training("log()")
        if self._metrics is not None:
            self._metrics.log_metrics({"epoch": self.epoch, **metrics}, step=self.step)
            self._metrics.save()
        if self.fabric.loggers:
            self.fabric.log_dict(metrics, step=self.step)

    def save(self, metrics: Mapping[str, Any] | None = None) -> bool:
        """Writes a checkpoint of this step, on all ranks together; the last thing that the loop does in a step.

        A disk that refuses is a warning and an event in the history: the training goes on, and the checkpoint before
        it stays.

        Args:
            metrics: What was measured of this state, for the best checkpoints: numbers, or tensors with one element.

        Returns:
            Whether it was written (a backend in the background: whether it was taken); the same on all ranks.

        Raises:
            ConfigError: The state holds what could not be read again.
        """
        checkpoints, session = self._require_training("save()")
        session.beat("save", self.step)
        self._batches.warn_of_others()
        # This also has the rows on the disk: no checkpoint is ahead of them.
        entry = {
            "precision": self.fabric.strategy.precision.state_dict(),
            LOGGER_POSITIONS: logger_positions([self._metrics]),
        }
        metadata = {
            "epoch": self.epoch,
            "state": self._objects.names(),
            "world_size": self.fabric.world_size,
            "replicas": replicas_of(self.fabric.strategy, self.fabric.world_size),
            "accumulate_grad_batches": self.accumulate_grad_batches,
        }
        saved = checkpoints.save(self.step, self._objects, entry, metrics or {}, metadata)
        session.beat("train", self.step)
        return saved

    def finish(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Saves the result, unless this step is saved already (with `metrics`, again), and records the run's end.

        Raises:
            CheckpointError: The result could not be saved, on all ranks; the run is not finished then.
        """
        if self.finished is not None:
            return
        checkpoints, session = self._require_training("finish()")
        if metrics is not None:
            checkpoints.saved = None
        checkpoints.save_for_sure(self.step, lambda: self.save(metrics))
        checkpoints.copied()
        if self._metrics is not None:
            self._metrics.finalize("success")
        session.complete(step=self.step, epoch=self.epoch)
        self.finished = f"step {self.step}"

    def _opened(self) -> RunSession:
        if self._session is None:
            raise ConfigError("the run is not open", where="LoopRun", fix="write `with LoopRun(...) as run:`")
        return self._session

    def _require_training(self, call: str) -> tuple[LoopCheckpoints, RunSession]:
        session = self._opened()
        if self.finished is not None:
            raise RunDirectoryError(
                "the run is finished, nothing more is written into it",
                where=str(session.path),
                why=f"LoopRun.{call} after the end: {self.finished}",
                fix="to train for longer, raise `max_steps` or `max_epochs` in `config`; "
                "for a new run beside it, RunConfig(name=..., resume='never')",
            )
        if not self._restored:
            raise ConfigError(
                f"LoopRun.{call} before restore()",
                where=str(session.path),
                why="the run may have a checkpoint, and would be overwritten by one that knows nothing of it",
                fix="call run.restore() before the loop; it does nothing in a new run",
            )
        assert self._checkpoints is not None
        return self._checkpoints, session
