"""When a checkpoint is written: a Lightning callback over Fairlead's commit protocol.

Every checkpoint is a directory, `checkpoints/step-00000200`, with `state.ckpt` (a plain Lightning
checkpoint), one `rank-*.pt` a rank, and a manifest.  It appears under its name only when all of it
is on disk; `latest` and retention move after that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final, cast

import lightning.pytorch as L
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fairlead.commit import FileWriter, RetentionPolicy, checkpoint_name, publish, retain, stage, write_file
from fairlead.config import CheckpointConfig
from fairlead.interfaces import DurableSaves
from fairlead_distributed import rng_state
from fairlead_lightning.session import STATE_FILE, RunSession

__all__ = ["Checkpoints", "CommittingIO", "rank_file"]

_USUAL_MONITORS: Final = ("val/loss", "val_loss")


def rank_file(rank: int) -> str:
    """The name of the part of a checkpoint that one rank writes."""
    return f"rank-{rank:05d}.pt"


def _save_rank_state(file: FileWriter) -> None:
    torch.save({"rng": rng_state()}, cast("IO[bytes]", file))


class CommittingIO(CheckpointIO):
    """Passes everything on to another CheckpointIO, and commits a checkpoint once its file is durable.

    Lightning hands a save from the trainer to the strategy to the CheckpointIO; what is to follow
    the save travels here, beside that path.

    Args:
        inner: The backend that reads and writes.
    """

    def __init__(self, inner: CheckpointIO) -> None:
        super().__init__()
        self.inner = inner
        self._then: Callable[[], None] | None = None

    def follow_with(self, then: Callable[[], None]) -> None:
        """Runs `then` after the next save, as soon as its file is durable."""
        self._then = then

    def finish(self) -> None:
        """Runs what is still to follow: the strategy wrote the checkpoint without its CheckpointIO."""
        then, self._then = self._then, None
        if then is not None:
            then()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Saves, and commits when the file is durable."""
        then, self._then = self._then, None
        if then is not None and storage_options is None and isinstance(self.inner, DurableSaves):
            self.inner.submit(checkpoint, path, then)
            return
        self.inner.save_checkpoint(checkpoint, path, storage_options)
        if then is not None:
            then()

    def load_checkpoint(
        self, path: _PATH, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads through the backend."""
        return self.inner.load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: _PATH) -> None:
        """Removes through the backend."""
        self.inner.remove_checkpoint(path)

    def wait(self) -> None:
        """Returns when every save is durable and committed; raises what failed in the background."""
        if isinstance(self.inner, DurableSaves):
            self.inner.wait()

    def teardown(self) -> None:
        """Ends the backend's own threads or processes."""
        self.inner.teardown()


class Checkpoints(Checkpoint):
    """Writes and keeps checkpoints as `trainer.checkpoint` says, and always at the end.

    Args:
        config: When to save and what to keep.
        session: The run that the checkpoints belong to.
    """

    def __init__(self, config: CheckpointConfig, session: RunSession) -> None:
        self.config = config
        self.session = session
        self.monitor: str | None = config.monitor
        self._saved_step = -1
        self._saved_at = time.monotonic()

    @property
    def directory(self) -> Path:
        """Where the checkpoints are."""
        return self.session.path / "checkpoints"

    # -- when

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The clock of `every_n_minutes` starts with the training."""
        self._saved_at = time.monotonic()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The step that was resumed from has its checkpoint already."""
        self._saved_step = trainer.global_step if self.session.resumed else -1

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves at a step that is due, never between the micro-batches of one step."""
        step = trainer.global_step
        if step in (0, self._saved_step) or (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        due = self.config.every_n_steps is not None and step % self.config.every_n_steps == 0
        if not due and self.config.every_n_minutes is not None:
            late = time.monotonic() - self._saved_at >= self.config.every_n_minutes * 60
            due = bool(trainer.strategy.broadcast(late))  # rank 0's clock decides for all
        if due:
            self.save(trainer, "step")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves what was just measured."""
        if self.config.on_validation and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves at the end of an epoch."""
        every = self.config.every_n_epochs
        if every is not None and (trainer.current_epoch + 1) % every == 0:
            self.save(trainer, "epoch")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves the result, and waits until it is durable."""
        self.save(trainer, "end")
        self.drain(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """On SIGTERM Lightning stops every rank at the same step boundary: the place to save."""
        if isinstance(exception, SIGTERMException) and trainer.state.fn == "fit":
            self.save(trainer, "terminated")
            self.drain(trainer)

    # -- what

    def save(self, trainer: L.Trainer, reason: str) -> None:
        """Writes a checkpoint of this step, on all ranks together, unless this step has one already.

        Args:
            trainer: The trainer.
            reason: Why now, for the history.
        """
        step = trainer.global_step
        if step == self._saved_step:
            return
        began = time.monotonic()
        name = checkpoint_name(step)
        staged = stage(self.directory, name, token=self.session.token)
        write_file(staged / rank_file(trainer.global_rank), _save_rank_state)
        metadata = self._metadata(trainer)
        policy = self._policy()

        def commit() -> None:
            published = publish(staged, metadata)
            self.session.event(
                "checkpoint",
                step=step,
                path=str(published.path.relative_to(self.session.path)),
                reason=reason,
                seconds=round(time.monotonic() - began, 3),
            )
            retain(self.directory, policy)

        trainer.strategy.barrier("fairlead.rank-files")  # every rank's own file is durable
        io = trainer.strategy.checkpoint_io
        if trainer.is_global_zero and isinstance(io, CommittingIO):
            io.follow_with(commit)
        trainer.save_checkpoint(staged / STATE_FILE, self.config.save_weights_only)
        if trainer.is_global_zero:
            io.finish() if isinstance(io, CommittingIO) else commit()
        self._saved_step, self._saved_at = step, time.monotonic()

    def drain(self, trainer: L.Trainer) -> None:
        """Waits for what is written in the background."""
        io = trainer.strategy.checkpoint_io
        if isinstance(io, CommittingIO):
            io.wait()

    def _metadata(self, trainer: L.Trainer) -> dict[str, Any]:
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if torch.as_tensor(v).numel() == 1}
        if self.monitor is None:
            self.monitor = next((name for name in _USUAL_MONITORS if name in metrics), None)
        return {
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "metrics": metrics,
            "monitor": self.monitor,
            "mode": self.config.mode,
            "world_size": trainer.world_size,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "start": self.session.start,
            "fingerprint": self.session.fingerprint,
        }

    def _policy(self) -> RetentionPolicy:
        return RetentionPolicy(
            last=self.config.keep_last,
            best=self.config.keep_best if self.monitor else 0,
            metric=self.monitor,
            mode=self.config.mode,
            every_n_steps=self.config.keep_every_n_steps,
        )
