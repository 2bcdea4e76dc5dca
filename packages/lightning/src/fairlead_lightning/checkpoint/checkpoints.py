"""When a checkpoint of a Trainer is written, over Fairlead's commit protocol."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Checkpoint

from fairlead.config import CheckpointConfig
from fairlead.errors import CheckpointError
from fairlead_distributed.run.commits import CLOCK_STEPS, Commits
from fairlead_distributed.run.session import STATE_FILE, RunSession
from fairlead_lightning import compat
from fairlead_lightning.checkpoint.saving import Correction, meet, write_state
from fairlead_lightning.resume.exact_resume import ExactResume
from fairlead_runs.batch_size import replicas_of
from fairlead_runs.commit import best, list_checkpoints, newest_complete, retain
from fairlead_runs.describe import described


@compat.only_its_own_batch_hooks
class Checkpoints(Checkpoint):
    """Writes and keeps checkpoints as `trainer.checkpoint` says, and always at the end.

    A save that fails (a full disk) is a warning; at the end of the run it is an error: its result would be lost.
    Lightning calls none of its methods, but looks up `best_model_path` among the callbacks that are a `Checkpoint`.

    Args:
        config: When to save, and what to keep.
        session: The run.
        exact: Gives each rank's part of a checkpoint.
        check: Looks at what is saved, on all ranks together: whether all weights are finite. It raises where the
            training cannot continue.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        session: RunSession,
        exact: ExactResume,
        check: Callable[[L.Trainer], bool],
    ) -> None:
        self.config = config
        self.session = session
        self._exact = exact
        self._check = check
        self.best_model_path = ""
        """Where training begins and ends, the best by `monitor`, else the newest: what `ckpt_path="best"` loads."""
        self._commits: Commits | None = None
        self._saved_at = time.monotonic()
        self._last_step = 0
        self._looks = 0
        self._accumulate = 1
        self._before: Mapping[str, Any] = {}
        self._measured: frozenset[str] = frozenset()
        self._measured_at = -1
        self._at_epoch_end: str | None = None
        self._after_validation = False
        self._trained = False
        self._began = False
        self._metrics: dict[str, float] | None = None

    @property
    def directory(self) -> Path:
        """Where the checkpoints are."""
        return self.session.path / "checkpoints"

    def fit_starts(self, trainer: L.Trainer) -> None:
        """The clock of `every_n_minutes` starts with the training; perhaps nothing is left to train."""
        meet(trainer)
        io = trainer.strategy.checkpoint_io
        self._commits = Commits(self.session, trainer.strategy, io, trainer.global_rank, self.config)
        self._find_best()
        self._saved_at = time.monotonic()
        self._accumulate = trainer.accumulate_grad_batches  # before a GradientAccumulationScheduler changes it

    def training_starts(self, trainer: L.Trainer) -> None:
        """The step that was resumed from has its checkpoint already, if that is one of this run."""
        compat.begin_next_epoch(trainer)
        self._began = True
        own = self.session.checkpoint is not None and self.session.checkpoint.is_relative_to(self.directory)
        self._last_step = trainer.global_step
        self._trained = False
        self._of_run.saved = _place(trainer) if own else None

    def restored(self, state: Mapping[str, Any]) -> None:
        """The metrics are back; what an earlier validation measured is no property of the next checkpoints."""
        self._measured, self._measured_at = frozenset(state.get("measured", ())), state.get("measured_at", -1)

    def after_batch(self, trainer: L.Trainer) -> None:
        """Saves at a step that is due, never between the micro-batches of one."""
        self._trained = True
        step, last = trainer.global_step, self._last_step
        if step == last and trainer.lightning_module.automatic_optimization:
            return
        self._last_step = step
        every = self.config.every_n_steps
        due = every is not None and step // every > last // every  # with two optimizers a batch has two steps
        self._looks += 1
        looks = trainer.world_size == 1 or self._looks % CLOCK_STEPS == 0
        if not due and self.config.every_n_minutes is not None and looks:
            late = time.monotonic() - self._saved_at >= self.config.every_n_minutes * 60
            due = bool(trainer.strategy.broadcast(late))  # rank 0's clock decides for all
        if due and _last_batch(trainer):
            self._at_epoch_end = "step"
        elif due:
            self.save(trainer, "step")

    def validation_starts(self, trainer: L.Trainer) -> None:
        """Remembers the metrics, to tell afterwards which of them are new."""
        self._before = dict(trainer.callback_metrics)

    def validation_ends(self, trainer: L.Trainer) -> None:
        """Notes that what was just measured is to be saved."""
        if trainer.sanity_checking:
            return
        before, self._before = self._before, {}
        self._measured = frozenset(k for k, v in trainer.callback_metrics.items() if v is not before.get(k))
        self._measured_at = trainer.global_step
        if self.config.on_validation and _last_batch(trainer):
            self._at_epoch_end = "validation"
        elif self.config.on_validation:
            self._after_validation = True

    def after_validation(self, trainer: L.Trainer) -> None:
        """Saves what was just measured, once the schedules that depend on it have seen it.

        What was measured between the micro-batches of a step is saved behind that step.
        """
        due = self._after_validation and not self._exact.in_window(trainer)
        if due:
            self._after_validation = False
            self._of_run.saved = None  # one that this step has already was saved before it was measured
            self.save(trainer, "validation")

    def epoch_ends(self, trainer: L.Trainer) -> None:
        """Notes that a save is due at the end of this epoch, and the metrics of it; it is saved a moment later.

        Only then have EarlyStopping, hooks and schedules had their say, and does Lightning count rightly in a resume.
        """
        every = self.config.every_n_epochs
        if self._at_epoch_end is None and every is not None and (trainer.current_epoch + 1) % every == 0:
            self._at_epoch_end = "epoch"
        self._metrics = self._current_metrics(trainer)

    def before_epoch(self, trainer: L.Trainer) -> None:
        """Saves what was due at the end of the last epoch."""
        reason, self._at_epoch_end = self._at_epoch_end, None
        if reason is not None:
            self.save(trainer, reason, compat.between_epochs)
        self._metrics = None

    def training_ends(self, trainer: L.Trainer) -> None:
        """Saves the result, and waits until it is durable."""
        reason, self._at_epoch_end = self._at_epoch_end, None
        whole: AbstractContextManager[None] = nullcontext()
        correct: Correction | None = None
        if self._trained:
            over = _last_batch(trainer)
            correct = compat.between_epochs if over else compat.inside_epoch
            whole = self._exact.at("between" if over else "cut")
        with whole:
            self._save_for_sure(trainer, reason or "end", correct)
        self._of_run.copied()
        self._find_best()

    def fit_ends(self, trainer: L.Trainer) -> None:
        """Nothing was left to train: an earlier start may have been killed in its retention."""
        if not self._began and self.session.finished is None:
            try:
                if trainer.is_global_zero:
                    retain(self.directory, self._of_run.policy, fence=self.session.fence)
            except CheckpointError as error:
                warnings.warn(f"older checkpoints were not deleted: {error.block()}", stacklevel=2)
            trainer.strategy.barrier()
            self._of_run.copied()
            self._find_best()

    def save_requested(self, trainer: L.Trainer) -> None:
        """Saves after a step because a save was requested; after an epoch's last batch, at the epoch's end."""
        if _last_batch(trainer):
            self._at_epoch_end = self._at_epoch_end or "asked"
        else:
            self.save(trainer, "asked")

    def save_at_stop(self, trainer: L.Trainer, *, between_epochs: bool) -> None:
        """Saves where all ranks stop, unless nothing was trained since the fit began; raises where it cannot."""
        if self._trained:
            self._save_for_sure(trainer, "stop", compat.between_epochs if between_epochs else None)

    def _find_best(self) -> None:
        newest, commits = newest_complete(self.directory).checkpoint, self._of_run
        if commits.monitor is None and newest is not None:
            commits.monitor = newest.metadata.get("monitor")
        rated = best(list_checkpoints(self.directory), commits.monitor, self.config.mode) if commits.monitor else []
        found = rated[0] if rated else newest
        self.best_model_path = str(found.path / STATE_FILE) if found is not None else ""

    def save(self, trainer: L.Trainer, reason: str, correct: Correction | None = None) -> None:
        """Writes a checkpoint of this step, on all ranks together, unless this step has one already."""
        if _place(trainer) != self._of_run.saved:
            self._commit(trainer, reason, correct)

    def _commit(self, trainer: L.Trainer, reason: str, correct: Correction | None) -> None:
        commits = self._of_run
        finite = self._check(trainer)

        def own() -> dict[str, Any]:
            measured = {"measured": sorted(self._measured), "measured_at": self._measured_at}
            return self._exact.capture(trainer) | measured

        write = partial(write_state, trainer, commits, self.config.save_weights_only, correct)
        metrics = self._metrics if self._metrics is not None else self._current_metrics(trainer)
        metadata = {
            # Epochs that are over; Lightning counts one that a limit cut short.
            "epoch": trainer.current_epoch - (correct is compat.inside_epoch),
            "hyperparameters": described(trainer.lightning_module)["args"],
            "world_size": trainer.world_size,
            "replicas": replicas_of(trainer.strategy, trainer.world_size),
            "accumulate_grad_batches": self._accumulate,
            "finite": finite,
        }
        commits.commit(trainer.global_step, own, write, metrics, metadata, position=_place(trainer), reason=reason)
        self._saved_at = time.monotonic()

    def _save_for_sure(self, trainer: L.Trainer, reason: str, correct: Correction | None) -> None:
        commit = partial(self._commit, trainer, reason, correct)
        self._of_run.save_for_sure(trainer.global_step, commit, position=_place(trainer), reason=reason)

    @property
    def _of_run(self) -> Commits:
        assert self._commits is not None  # made when the fit starts
        return self._commits

    def _current_metrics(self, trainer: L.Trainer) -> dict[str, float]:
        # What an earlier validation measured is no property of this state.
        stale = self._measured if self._measured_at != trainer.global_step else ()
        current = {k: v for k, v in trainer.callback_metrics.items() if k not in stale}
        return {k: float(v) for k, v in current.items() if torch.as_tensor(v).numel() == 1}


def _place(trainer: L.Trainer) -> tuple[int, int]:
    """What tells one state that is worth saving from another.

    A loop that steps its optimizers by itself may accumulate over many batches: each of them is one.
    """
    by_hand = not trainer.lightning_module.automatic_optimization
    return trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.total.ready if by_hand else 0


def _last_batch(trainer: L.Trainer) -> bool:
    """Whether the epoch ends after this batch; an endless loader does not know it."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)
