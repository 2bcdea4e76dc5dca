"""`LoopRun`: a run directory and exact resume for a loop of one's own on a Lightning Fabric."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

import lightning.fabric as lf
import torch.distributed as dist
from torch.utils.data import DataLoader

from fairlead.config import CheckpointConfig, RunConfig
from fairlead.errors import ConfigError, RunDirectoryError
from fairlead.plugins import PluginManager, default_plugins
from fairlead_distributed import ResumableDistributedSampler
from fairlead_distributed.run.joining import leave_at_exit
from fairlead_distributed.run.opening import open_session
from fairlead_distributed.run.session import STATE_FILE, RunSession
from fairlead_lightning.checkpoint.committing import copies_of
from fairlead_lightning.custom_loop.batches import batches_of
from fairlead_lightning.custom_loop.identity import as_seen, job_of, only_what_is_kept, run_config
from fairlead_lightning.custom_loop.loading import Loaded, load_checkpoint
from fairlead_lightning.custom_loop.saving import LoopCheckpoints, own_checkpoint_io
from fairlead_lightning.custom_loop.state import OWN, LoopState
from fairlead_lightning.loggers.positions import LOGGER_POSITIONS, logger_positions, resume_position
from fairlead_lightning.metrics.metrics_file import MetricsFile
from fairlead_runs.batch_policy import batch_plan
from fairlead_runs.commit import RetentionPolicy, newest_complete

__all__ = ["LoopRun"]

T = TypeVar("T")

_USUAL_MONITORS: Final = ("val/loss", "val_loss")


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
        per_rank: Mapping[str, Any] | None = None,
        batch_policy: Literal["keep_global", "keep_per_device"] | None = None,
        environ: Mapping[str, str] | None = None,
        plugins: PluginManager | None = None,
        **state: Any,
    ) -> None:
        self.fabric = fabric
        self.epoch = 0
        self.finished: str | None = None
        self._objects = LoopState(state, per_rank or {})
        self._run = run_config(run)
        self._config = dict(config or {})
        self._keep = only_what_is_kept(checkpoint or CheckpointConfig())
        self._batch_policy = batch_policy
        self._environ = os.environ if environ is None else environ
        self._plugins = plugins
        self._step = 0
        self._session: RunSession | None = None
        self._checkpoints: LoopCheckpoints | None = None
        self._metrics: MetricsFile | None = None
        self._monitor = self._keep.monitor
        self._accumulate = 1
        self._restored = self._drawn = False
        self._positions: list[tuple[int, int]] = []

    # -- open and closed

    def __enter__(self) -> Self:
        """Opens the run on all ranks.

        Raises:
            FairleadError: The run directory is locked, of another run, or not writable.
            ConfigError: The Fabric is not launched, or this object was opened before.
        """
        fabric = self.fabric
        if self._session is not None:
            raise ConfigError("a LoopRun is opened once", where="LoopRun", fix="make a new one for another start")
        if fabric.world_size > 1 and not dist.is_initialized():
            raise ConfigError("the ranks are not connected", where="LoopRun", fix="call fabric.launch() before")
        if dist.is_initialized():
            leave_at_exit()
        plugins = self._plugins if self._plugins is not None else default_plugins()
        job = job_of(fabric, self._run, self._config, self.state)
        resolution = as_seen(fabric, self._config, self._batch_policy, environ=self._environ, plugins=plugins)
        copies = copies_of(own_checkpoint_io(fabric))
        session = open_session(job, resolution, self._run, environ=self._environ, copies=copies)
        self._session = session
        self.finished = session.finished
        try:
            if self.finished is None:
                self._accumulate = batch_plan(resolution, session.previous).accumulate_grad_batches
                session.join(fabric.global_rank, fabric.local_rank, fabric.node_rank)
                session.beat("setup", 0)
                self._checkpoints = LoopCheckpoints(fabric, session)
        except BaseException:
            session.close()
            raise
        for message in session.messages:
            fabric.print(message)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends this start in the history, waits for what is still being written, and releases the run directory."""
        session = self._opened()
        try:
            if self.finished is None:
                self._end(session, error)
        finally:
            if self._metrics is not None:
                self._metrics.finalize("success" if error is None else "failed")
            session.close()

    def _end(self, session: RunSession, error: BaseException | None) -> None:
        if error is None:
            session.event("stop", step=self.step, reason="the loop ended without finish()")
        else:
            stopped = isinstance(error, (KeyboardInterrupt, SystemExit))
            text = f"{type(error).__name__}: {error}"[:2000]
            session.event("stop" if stopped else "failed", rank=self.fabric.global_rank, step=self.step, error=text)
        session.beat("stopped" if error is None else "failed", self.step)
        if self._checkpoints is not None:
            self._checkpoints.finish_writes(self.step)

    # -- what the loop uses

    @property
    def state(self) -> dict[str, Any]:
        """What was given as the same on all ranks, by name."""
        return self._objects.shared

    @property
    def per_rank(self) -> dict[str, Any]:
        """What was given as this rank's own, by name."""
        return self._objects.per_rank

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

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches of each rank to one optimizer step: `config["accumulate_grad_batches"]`, or 1.

        Another number where the run goes on with other ranks and `batch_policy="keep_global"`.
        """
        return self._accumulate

    def restore(self) -> bool:
        """Goes on from the newest complete checkpoint of the run; the random generators come last.

        Call it once, after everything is set up and seeded, and draw nothing between it and the loop.
        A finished run gives its last state as well: its loop finds nothing left to do.

        Returns:
            Whether there was a checkpoint.  Without one nothing is changed.

        Raises:
            CheckpointError: The checkpoint is damaged, holds other objects, or does not fit these.  Some of them may
                have been loaded already; the run cannot go on with them.
        """
        session = self._opened()
        if self._restored:
            raise ConfigError("the run was restored already", where="LoopRun.restore()", fix="call it once")
        file = session.checkpoint
        if self.finished is not None:
            self.fabric.print(f"{session.path} is finished: {self.finished}")
            newest = newest_complete(session.path / "checkpoints").checkpoint
            file = newest.path / STATE_FILE if newest is not None else None
        loaded = load_checkpoint(file, self._objects, self.fabric) if file is not None else None
        if loaded is not None:
            self.step, self.epoch = loaded.step, loaded.epoch
            self._monitor = self._monitor or loaded.monitor  # or the best so far would not be kept
        self._restored = True
        if self._checkpoints is not None:
            own = file is not None and file.is_relative_to(session.path)
            self._checkpoints.saved_step = self.step if own else -1
            if self.fabric.is_global_zero:
                self._metrics = _metrics_from(session.path, loaded if own else None)
            session.begin(step=self.step, epoch=self.epoch)
        self._positions = self._sampled()
        return file is not None

    def batches(self, loader: DataLoader[T]) -> Iterator[T]:
        """The loader's batches to the end of the epoch, on this rank's device; each counts as trained on.

        It goes on where the run was interrupted, and the iterator it makes takes nothing from the random generators:
        an interrupted epoch makes one more of them than an undisturbed one.

        Args:
            loader: A loader over a `ResumableDistributedSampler` of this run, with any number of workers; or a loader
                with a state of its own that was given in `per_rank`.  Not what `fabric.setup_dataloaders` returned.

        Raises:
            ConfigError: The position of this loader is not saved in this run, or the run is not restored yet.
            RunDirectoryError: The run is finished.
        """
        self._require_training("batches()")
        batches = batches_of(loader, self._objects, self.fabric, self.step)
        self._drawn = True
        return batches

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Adds values of this step to `metrics.csv`, and passes them to the Fabric's loggers.

        Args:
            metrics: Numbers, or tensors with one element; rank 0's are written.
        """
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
        self._warn_of_other_batches()
        own: Any
        try:
            others, own = self._objects.others(), self._objects.own(buffers=checkpoints.leaves_out_buffers)
        except ConfigError as error:
            others, own = {}, error
        # This also has the rows on the disk: no checkpoint is ahead of them.
        entry = {
            "precision": self.fabric.strategy.precision.state_dict(),
            LOGGER_POSITIONS: logger_positions([self._metrics]),
        }
        state = {**self._objects.of_strategy(), **others, OWN: entry}
        metadata = self._metadata(session, metrics or {})
        saved = checkpoints.save(self.step, state, own, metadata, self._policy())
        session.beat("train", self.step)
        return saved

    def finish(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Saves the result, unless this step is saved already, and records that the run is over.

        Args:
            metrics: As for `save`; with them the step is saved again.

        Raises:
            CheckpointError: The result could not be saved, on all ranks; the run is not finished then.
        """
        if self.finished is not None:
            return
        checkpoints, session = self._require_training("finish()")
        if metrics is not None:
            checkpoints.saved_step = -1
        checkpoints.save_for_sure(self.step, lambda: self.save(metrics))
        checkpoints.copied()
        if self._metrics is not None:
            self._metrics.finalize("success")
        session.complete(step=self.step, epoch=self.epoch)
        session.beat("end", self.step)
        self.finished = f"step {self.step}"

    # -- inside

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

    def _metadata(self, session: RunSession, metrics: Mapping[str, Any]) -> dict[str, Any]:
        values = {name: _number(name, value) for name, value in metrics.items()}
        if self._monitor is None:
            self._monitor = next((name for name in _USUAL_MONITORS if name in values), None)
        return {
            "step": self.step,
            "epoch": self.epoch,
            "state": self._objects.names(),
            "metrics": values,
            "monitor": self._monitor,
            "mode": self._keep.mode,
            "world_size": self.fabric.world_size,
            "accumulate_grad_batches": self._accumulate,
            "start": session.start,
            "fingerprint": session.fingerprint,
            **session.origin,
        }

    def _policy(self) -> RetentionPolicy:
        return RetentionPolicy.of(self._keep, self._monitor)

    def _sampled(self) -> list[tuple[int, int]]:
        samplers = (one for one in self.state.values() if isinstance(one, ResumableDistributedSampler))
        return [(one.epoch, one.consumed) for one in samplers]

    def _warn_of_other_batches(self) -> None:
        if self._drawn or self._sampled() == self._positions:
            return
        self._drawn = True  # said once
        warnings.warn(
            "the batches do not come from LoopRun.batches(): a run that is interrupted within an epoch may go on "
            "with other random numbers than an undisturbed one",
            stacklevel=3,
        )


def _metrics_from(path: Path, loaded: Loaded | None) -> MetricsFile:
    """The metrics as they were at the checkpoint: what came after it will be done again."""
    if loaded is None:
        return MetricsFile(path, resume_step=None)
    position = resume_position(loaded.own, MetricsFile.position_key)
    # Without a position by the step: the rows here count from 1, Lightning's from 0.
    return MetricsFile(path, resume_step=loaded.step + 1, position=position)


def _number(name: str, value: Any) -> float:
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the metric {name!r} is not one number", where="LoopRun.save(metrics=...)", why=str(error)
        ) from error
