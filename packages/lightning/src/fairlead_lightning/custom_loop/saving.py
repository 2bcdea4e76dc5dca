"""One commit of a loop's run: every rank writes its own file, Fabric's strategy the shared state."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import lightning.fabric as lf
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.distributed.checkpoint.api import CheckpointException

from fairlead.errors import CheckpointError, ConfigError, FairleadError
from fairlead_distributed.objects import broadcast_object, gather_objects
from fairlead_distributed.run.session import STATE_FILE, RunSession
from fairlead_lightning.checkpoint.committing import (
    CommittingIO,
    Hashes,
    copies_of,
    delete_failed_stages,
    of_earlier_saves,
    raised_by,
    retain_everywhere,
)
from fairlead_lightning.checkpoint.saving import explained, first_error
from fairlead_lightning.resume.rank_state import rank_file
from fairlead_runs.commit import (
    FileHash,
    FileWriter,
    RetentionPolicy,
    checkpoint_name,
    publish,
    stage,
    write_file,
)

__all__ = ["LoopCheckpoints", "own_checkpoint_io"]

T = TypeVar("T")
_Problem = FairleadError | OSError | None


class LoopCheckpoints:
    """Writes the checkpoints of a loop's run; each method is called by all ranks together.

    Args:
        fabric: What the ranks and the strategy are known from.
        session: The run.

    Raises:
        ConfigError: The CheckpointIO does not say when a file is complete.
    """

    def __init__(self, fabric: lf.Fabric, session: RunSession) -> None:
        self.fabric = fabric
        self.session = session
        self._io, self._theirs = _committing(fabric)

    @property
    def leaves_out_buffers(self) -> bool:
        """Whether the shared state may hold other buffers than this rank's.

        Rank 0's own file has rank 0's; what a strategy puts together has any rank's.
        """
        return self._io is None or not self.fabric.is_global_zero

    def save(
        self, step: int, state: Mapping[str, Any], own: Any, metadata: Mapping[str, Any], keep: RetentionPolicy
    ) -> bool:
        """Writes and commits a checkpoint; a disk that refuses is a warning and an event.

        Args:
            step: The step that it is of.
            state: For `fabric.save`.
            own: This rank's part, plain data, or the error that making it raised: no rank saves then.
            metadata: For the manifest.
            keep: What is kept once this one is complete.

        Returns:
            Whether it is written, or a backend in the background has taken it; the same on all ranks.

        Raises:
            ConfigError: A rank gave this error as `own`.
        """
        began = time.monotonic()
        staged, digest, error = self._stage(step, own)
        reports = gather_objects((digest, error))
        refused = next((e for _, e in reports if isinstance(e, ConfigError)), None)
        error = first_error([e for _, e in reports])
        if error is not None:
            self._fail(step, error, staged)
            if refused is not None:
                raise refused
            return False
        assert staged is not None

        def commit(hashes: Hashes) -> None:
            own = {rank_file(rank): digest for rank, (digest, _) in enumerate(reports) if digest is not None}
            published = publish(staged, metadata, hashes={**own, **hashes})
            self.session.event(
                "checkpoint",
                step=step,
                path=str(published.path.relative_to(self.session.path)),
                metrics=metadata["metrics"],
                seconds=round(time.monotonic() - began, 3),
            )
            retain_everywhere(self._io, published, keep)

        error = broadcast_object(self._write(staged / STATE_FILE, state, commit))
        self._fail(step, error, staged)
        return error is None or of_earlier_saves(error, staged / STATE_FILE)

    def drain(self, step: int) -> bool:
        """Waits for what is written in the background; returns whether all of it was."""
        io = self._io if self.fabric.is_global_zero else None
        error = broadcast_object(raised_by(io.wait) if io is not None else None)
        self._fail(step, error)
        return error is None

    def finish_writes(self, step: int) -> None:
        """Waits for what is written in the background, on this rank alone: the others may be gone."""
        if self._io is not None and self.fabric.is_global_zero:
            self._fail(step, raised_by(self._io.wait))

    def copied(self) -> None:
        """Waits for the copies elsewhere, where the CheckpointIO keeps them.

        Raises:
            CheckpointError: They are not complete; on all ranks.
        """
        copies = copies_of(self._io) if self.fabric.is_global_zero else None
        lacking = broadcast_object(copies.wait_uploaded() if copies is not None else None)
        if lacking is not None:
            raise CheckpointError(
                "the result is saved here, but its copy is not complete",
                where=str(self.session.path),
                why=lacking,
                fix="start it again on this machine: it uploads what is lacking",
            )

    def close(self) -> None:
        """Gives the Fabric its own CheckpointIO back."""
        if self._theirs is not None:
            self.fabric.strategy.checkpoint_io = self._theirs

    def _stage(self, step: int, own: Any) -> tuple[Path | None, FileHash | None, _Problem]:
        """The folder of the next checkpoint with this rank's file in it, or why there is none."""
        staged = None
        try:
            staged = stage(self.session.path / "checkpoints", checkpoint_name(step), token=self.session.token)
            if isinstance(own, FairleadError):
                return staged, None, own
            file = staged / rank_file(self.fabric.global_rank)
            return staged, write_file(file, partial(_dump, own)), None
        except (FairleadError, OSError) as error:
            return staged, None, error

    def _write(self, file: Path, state: Mapping[str, Any], commit: Callable[[Hashes], None]) -> _Problem:
        """Has the strategy write the shared state, then commits; what went wrong, as rank 0 knows it."""
        if self._io is not None:
            if self.fabric.is_global_zero:
                self._io.follow_with(commit)
            self.fabric.save(file, dict(state))
            return self._io.finish() if self.fabric.is_global_zero else None
        error: _Problem = None
        try:
            self.fabric.save(file, dict(state))
        except (FairleadError, OSError, RuntimeError, CheckpointException) as raised:
            error = explained(raised, file)
            self.fabric.barrier()  # the others wait at the end of their `save`
        error = first_error(gather_objects(error))
        return raised_by(partial(commit, {})) if error is None and self.fabric.is_global_zero else error

    def _fail(self, step: int, error: _Problem, staged: Path | None = None) -> None:
        """Says loudly that a checkpoint was not written, and deletes what there is of it."""
        if error is None or not self.fabric.is_global_zero:
            return
        text = error.block() if isinstance(error, FairleadError) else f"{type(error).__name__}: {error}"
        self.session.event("checkpoint-failed", step=step, error=text)
        if not isinstance(error, ConfigError):  # that one is raised
            warnings.warn(f"the training goes on, but no checkpoint was written: {text}", stacklevel=4)
        delete_failed_stages(error, staged)


def own_checkpoint_io(fabric: lf.Fabric) -> Any:
    """The CheckpointIO of a Fabric's strategy; None where that writes past it: FSDP, FSDP2 and DeepSpeed."""
    try:
        return fabric.strategy.checkpoint_io
    except NotImplementedError:
        return None


def _dump(own: Any, file: FileWriter) -> None:
    torch.save(own, cast("IO[bytes]", file))


def _committing(fabric: lf.Fabric) -> tuple[CommittingIO | None, Any]:
    """The CheckpointIO that commits, now the Fabric's own, and the one before it; None where the strategy has none."""
    theirs = own_checkpoint_io(fabric)
    if theirs is None:
        return None, None
    if isinstance(theirs, AsyncCheckpointIO):
        raise ConfigError(
            "Lightning's AsyncCheckpointIO does not say when a file is complete and may be committed",
            where="LoopRun",
            fix="leave it out, or use fabric(TrainerConfig(checkpoint_io='async'))",
        )
    io = CommittingIO(theirs)
    fabric.strategy.checkpoint_io = io
    return io, theirs
