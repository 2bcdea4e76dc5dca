"""One commit of all ranks together, whatever the engine.

Every rank writes its own file and says its checksum or what went wrong; if all of them are durable, the engine writes
the shared state, and rank 0 publishes the checkpoint. Otherwise no rank continues with it.
"""

from __future__ import annotations

import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, Protocol, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fairlead.config import CheckpointConfig
from fairlead.errors import CheckpointError, ConfigError, FairleadError
from fairlead_distributed._sampling import derive_seed
from fairlead_distributed.objects import gather_objects
from fairlead_distributed.rng import seed_xla
from fairlead_distributed.run.session import STATE_FILE, RunSession
from fairlead_runs.checkpoint_io import CheckpointCopies, DurableSaves, ShardedSaves
from fairlead_runs.commit import (
    FileHash,
    FileWriter,
    RetentionPolicy,
    abandon,
    checkpoint_name,
    publish,
    retain,
    stage,
    write_file,
)

CLOCK_STEPS: Final = 10
"""Steps between two looks at rank 0's clock, by which all ranks go: to hear of it they wait for each other."""


def rank_file(rank: int) -> str:
    """The name of the part of a checkpoint that one rank writes."""
    return f"rank-{rank:05d}.pt"


def load_part(path: Path, what: str = "a rank's part of the checkpoint") -> Any:
    """What a file of a checkpoint holds, tensors and plain data; `what` is its name in the error.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip, OS: torch.load raises whatever it meets
        raise CheckpointError(
            f"{what} cannot be read",
            where=str(path),
            why=f"{type(error).__name__}: {error}",
            fix="name an older checkpoint: --resume PATH, in a script RunConfig(resume=PATH)",
        ) from error


def seed_anew(seed: int, step: int, rank: int) -> None:
    """Seeds the generators of a `data_rank` where there is no state of them: another number of ranks continues."""
    number = derive_seed("rank", seed, step, rank)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)
    seed_xla(number)


Hashes = Mapping[str, FileHash]
"""The checksums that were computed in passing, by file name."""
Commit = Callable[[Hashes], None]
"""Publishes what was written; takes the checksums that are known, by name in the checkpoint."""
Problem = FairleadError | OSError | None
T = TypeVar("T")


class Ranks(Protocol):
    """What a commit asks of the engine that connects the ranks; a strategy of Lightning's is one."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0, which publishes."""

    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object of rank `src`, on all ranks."""

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks."""


_USUAL_MONITORS: Final = ("val/loss", "val_loss")


class Commits:
    """Writes and commits the checkpoints of a run; each method is called by all ranks together.

    `io` is Lightning's CheckpointIO; where the state is written without one, what copies it elsewhere, or None. `saved`
    is the step, or the position in the training, that is written, or taken in the background.
    """

    def __init__(self, session: RunSession, ranks: Ranks, io: object, rank: int, config: CheckpointConfig) -> None:
        self.session = session
        self.config = config
        self.monitor = config.monitor
        self.saved: object = None
        self._ranks = ranks
        self._io = io
        self._rank = rank
        self._staged_step = -1

    @property
    def policy(self) -> RetentionPolicy:
        """What is kept once a checkpoint is complete."""
        return RetentionPolicy.of(self.config, self.monitor)

    def commit(
        self,
        step: int,
        own: Callable[[], Any],
        write: Callable[[Path, Commit], Problem],
        metrics: Mapping[str, float],
        metadata: Mapping[str, Any],
        *,
        position: object = None,
        **event: Any,
    ) -> bool:
        """Writes and commits a checkpoint; a disk that refuses is a warning and an event that name the rank.

        `own` gives this rank's part; its `ConfigError` is raised on all ranks. `saved` becomes `position`, where
        a step has several positions that are worth saving. Returns, the same on all ranks, whether
        the checkpoint is written or a backend in the background has taken it.
        """
        if step == self._staged_step:  # its stage may still be written, and this save would write into it
            self.drain(step, **event)
        self._staged_step = step
        began = time.monotonic()
        if self.monitor is None:
            self.monitor = next((name for name in _USUAL_MONITORS if name in metrics), None)
        keep = self.policy
        manifest = {
            "step": step,
            "metrics": metrics,
            "monitor": self.monitor,
            "mode": self.config.mode,
            "start": self.session.start,
            "fingerprint": self.session.fingerprint,
            **self.session.origin,
            **metadata,
        }
        staged, digest, error = self._stage(step, own)
        reports = gather_objects((digest, error))
        error = self._of_xla(_first_error([problem for _, problem in reports]))
        if error is not None:
            self.report(step, error, staged, **event)
            for _, problem in reports:
                if isinstance(problem, ConfigError):
                    raise problem
            return False
        assert staged is not None

        def commit(hashes: Hashes) -> None:
            known = {rank_file(rank): digest for rank, (digest, _) in enumerate(reports) if digest is not None}
            published = publish(staged, manifest, hashes={**known, **hashes}, fence=self.session.fence)
            self.session.event(
                "checkpoint",
                step=step,
                path=str(published.path.relative_to(self.session.path)),
                metrics=metrics,
                seconds=round(time.monotonic() - began, 3),
                **event,
            )
            copies = copies_of(self._io)
            if copies is not None:
                copies.committed(published, keep)
            else:
                retain(published.path.parent, keep, fence=self.session.fence)

        file = staged / STATE_FILE
        error = write(file, commit)
        self.report(step, error, staged, **event)
        # Rank 0 alone knows whether it is saved; all must decide alike whether to save at the end.
        saved = bool(self._ranks.broadcast(error is None or _of_earlier_saves(error, file)))
        if saved:
            self.saved = step if position is None else position
        if self.session.proof is not None:  # which ends all ranks once its last checkpoint is there
            self.drain(step, **event)
        return saved

    def through_strategy(self, file: Path, save: Callable[[], None], commit: Commit) -> Problem:
        """Has the strategy write the shared state, and commits it on rank 0, at once or when it is durable.

        Rank 0 gets why it failed, on whichever rank that was; it is not raised, because all continue.
        """
        zero, error = self._ranks.is_global_zero, None
        with committing(self._io if zero else None, commit) as outcome:
            try:
                save()
            except write_errors() as raised:
                error = explained(raised, file)
                self._ranks.barrier("Trainer.save_checkpoint")  # the others wait there at the end of their save
        error = _first_error(gather_objects(error))  # a strategy that writes by itself may fail on one rank only
        if error is not None or not zero:
            return error
        return outcome[0] if outcome else raised_by(partial(commit, {}))

    def save_for_sure(self, step: int, save: Callable[[], object], *, position: object = None, **event: Any) -> None:
        """Saves, unless this step or `position` is saved, and waits until it is durable; else all ranks raise."""
        position = step if position is None else position
        for _ in range(2):  # what was taken in the background may fail only now
            if self.saved != position:
                save()
            if self.drain(step, **event):
                break
            self.saved = None
        if self.saved != position:
            raise self.unsaved(step)

    def unsaved(self, step: int) -> CheckpointError:
        """The error that a state which has to be saved could not be."""
        return CheckpointError(
            f"the state at step {step} could not be saved",
            where=str(self.session.path / "checkpoints"),
            why="the warnings before this say why; the checkpoints before it are intact",
            fix="make room or get write access, and restart the job: it resumes from the newest checkpoint",
        )

    def drain(self, step: int, **event: Any) -> bool:
        """Waits for what is written in the background; returns whether all of it was, the same on all ranks."""
        error = self._finished_writes()
        self.report(step, error, **event)
        return bool(self._ranks.broadcast(error is None))

    def finish_writes(self, step: int) -> None:
        """Waits for what is written in the background, on this rank alone: the others may be gone."""
        self.report(step, self._finished_writes())

    def copied(self) -> None:
        """The run is over: waits for the copies elsewhere; all ranks raise where they are not complete."""
        copies = copies_of(self._io) if self._ranks.is_global_zero else None
        lacking = copies.wait_uploaded() if copies is not None else None
        self.session.raise_if_replaced()
        lacking = self._ranks.broadcast(lacking)
        if lacking is not None:
            raise CheckpointError(
                "the result is saved here, but its copy is not complete",
                where=str(self.session.path / "checkpoints"),
                why=lacking,
                fix="restart the job on this machine: it uploads what is missing",
            )

    def report(self, step: int, error: Problem, staged: Path | None = None, **event: Any) -> None:
        """Says loudly that a checkpoint was not written, and deletes what there is of it; rank 0 alone does it.

        Raises where it was not, because another start owns the run.
        """
        if error is None or not self._ranks.is_global_zero:
            return
        self.session.raise_if_replaced(look=True)
        text = error.block() if isinstance(error, FairleadError) else f"{type(error).__name__}: {error}"
        self.session.event("checkpoint-failed", step=step, error=text, **event)
        if not isinstance(error, ConfigError):  # that one is raised
            warnings.warn(f"training continues, but no checkpoint was written: {text}", stacklevel=4)
        left = {file.parent for file in _where(error) if file.name == STATE_FILE}
        if staged is not None and not _of_earlier_saves(error, staged / STATE_FILE):
            left.add(staged)
        for folder in left:
            if folder.name.startswith(".stage-") and folder.is_dir():
                raised_by(partial(abandon, folder))  # the disk may be full

    def _stage(self, step: int, own: Callable[[], Any]) -> tuple[Path | None, FileHash | None, Problem]:
        staged = None
        try:
            staged = stage(self.session.path / "checkpoints", checkpoint_name(step), token=self.session.token)
            return staged, write_file(staged / rank_file(self._rank), partial(dump, own())), None
        except (FairleadError, OSError) as error:
            return staged, None, error

    def _of_xla(self, error: Problem) -> Problem:
        """The error, or that another rank has one: XLA's ranks are in no process group, and each knows its own only."""
        decide = getattr(self._ranks, "reduce_boolean_decision", None)
        if dist.is_initialized() or decide is None or decide(error is None):
            return error
        return error or CheckpointError("a rank could not write its part of a checkpoint", where=str(self.session.path))

    def _finished_writes(self) -> Problem:
        return raised_by(self._io.wait) if isinstance(self._io, (DurableSaves, ShardedSaves)) else None


def dump(own: Any, file: FileWriter) -> None:
    """Writes tensors and plain data."""
    torch.save(_off_xla(own), cast("IO[bytes]", file))


def _off_xla(own: Any) -> Any:
    """With the tensors of XLA devices in host memory: torch alone could not read them."""
    on_xla = [leaf for leaf in tree_leaves(own) if isinstance(leaf, Tensor) and leaf.device.type == "xla"]
    moved = {id(tensor): tensor.cpu() for tensor in on_xla}
    return tree_map(lambda leaf: moved.get(id(leaf), leaf), own) if moved else own


def _first_error(errors: list[Problem]) -> Problem:
    """The error of the lowest rank that has one, which then says its rank."""
    for rank, error in enumerate(errors):
        if rank and isinstance(error, FairleadError):
            error.why = f"{error.why or 'it failed there'} (rank {rank})"
        if error is not None:
            return error
    return None


def write_errors() -> tuple[type[BaseException], ...]:
    """What a failed write raises; torch's own exception too, where its distributed checkpoints are loaded."""
    torchs = getattr(sys.modules.get("torch.distributed.checkpoint.api"), "CheckpointException", None)
    return (FairleadError, OSError, RuntimeError, *([torchs] if torchs is not None else []))


def explained(error: BaseException, file: Path) -> FairleadError | OSError:
    """What was raised while a checkpoint was written, as an error of the disk or of ours."""
    if (failures := getattr(error, "failures", None)) is not None:  # torch's, by rank
        error = next(iter(failures.values()))[0]
    if isinstance(error, (FairleadError, OSError)):
        return error
    return CheckpointError("torch could not write it", where=str(file), why=f"{type(error).__name__}: {error}")


def _where(error: FairleadError | OSError) -> list[Path]:
    """What an error is about: of a backend in the background, each file that it has not written."""
    return [Path(line) for line in (error.where or "").splitlines()] if isinstance(error, CheckpointError) else []


def _of_earlier_saves(error: FairleadError | OSError, file: Path) -> bool:
    """Whether a backend in the background took this file, and reports that others were not written."""
    where = _where(error)
    return bool(where) and all(one.name == STATE_FILE and one != file for one in where)


@contextmanager
def committing(io: object, commit: Commit) -> Iterator[list[Problem]]:
    """Inside it, the first save of a CheckpointIO is committed once it is durable, perhaps in the thread that writes.

    The method is replaced on the object: XLA's strategies take no other class than their own.  Yields a list that gets
    what became of the save, None or why it failed: raised it would leave Lightning's other ranks waiting behind it.
    """
    outcome: list[Problem] = []
    if io is None:
        yield outcome
        return
    writer: Any = io

    def save_checkpoint(checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None) -> None:
        del vars(writer)["save_checkpoint"]

        def save() -> None:
            if storage_options is None and isinstance(io, DurableSaves):
                io.submit(checkpoint, path, lambda digest: commit({Path(path).name: digest} if digest else {}))
            else:
                writer.save_checkpoint(checkpoint, os.fspath(path), storage_options)
                commit({})

        outcome.append(raised_by(save))

    vars(io)["save_checkpoint"] = save_checkpoint
    try:
        yield outcome
    finally:
        vars(io).pop("save_checkpoint", None)


def copies_of(io: object) -> CheckpointCopies | None:
    """The backend, if it keeps copies of the checkpoints elsewhere."""
    return io if isinstance(io, CheckpointCopies) else None


def raised_by(call: Callable[[], None]) -> Problem:
    """What a call raises, if that is an error of the disk or of ours."""
    try:
        call()
    except (FairleadError, OSError) as error:
        return error
    return None
