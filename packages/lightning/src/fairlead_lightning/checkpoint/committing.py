"""How a save becomes a commit: beside Lightning's path from the trainer to the CheckpointIO, also when it fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from fairlead.errors import FairleadError
from fairlead_runs.checkpoint_io import CheckpointCopies, DurableSaves
from fairlead_runs.commit import FileHash

Hashes = Mapping[str, FileHash]
"""The checksums that were computed in passing, by file name."""
Commit = Callable[[Hashes], None]
"""Publishes what was written; takes the checksums that are known, by name in the checkpoint."""
Problem = FairleadError | OSError | None


@contextmanager
def committing(io: object, commit: Commit) -> Iterator[list[Problem]]:
    """Inside it, the first save of a CheckpointIO is committed once its file is durable.

    Lightning hands a save from the trainer to the strategy to the CheckpointIO, and has no place for what follows it.
    The method is replaced on the object, as XLA's strategies take no other class than their own.

    Args:
        io: The CheckpointIO; nothing happens where it is none.
        commit: Called in this thread, or later in the one that writes.

    Yields:
        A list: what became of the save once it was asked for, None or why it failed. That is not raised, because
        Lightning's other ranks wait right behind the save.
    """
    outcome: list[Problem] = []
    if not isinstance(io, CheckpointIO):
        yield outcome
        return

    def save_checkpoint(checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None) -> None:
        del vars(io)["save_checkpoint"]

        def save() -> None:
            if storage_options is None and isinstance(io, DurableSaves):
                io.submit(checkpoint, path, lambda digest: commit({Path(path).name: digest} if digest else {}))
            else:
                io.save_checkpoint(checkpoint, os.fspath(path), storage_options)
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
