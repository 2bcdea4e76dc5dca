"""How a save becomes a commit: beside Lightning's path from the trainer to the CheckpointIO, also when it fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from fairlead.errors import FairleadError
from fairlead_runs.checkpoint_io import CheckpointCopies, DurableSaves, PlaceTensor, ShardedLoads, ShardedSaves
from fairlead_runs.commit import FileHash

__all__ = ["CommittingIO", "Hashes", "copies_of", "raised_by"]

Hashes = Mapping[str, FileHash]
"""The checksums that were computed in passing, by file name."""


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
        self._then: Callable[[Hashes], None] | None = None
        self._error: FairleadError | OSError | None = None

    def follow_with(self, then: Callable[[Hashes], None]) -> None:
        """Runs `then` after the next save, as soon as its file is durable; `finish` tells whether that save failed."""
        self._then = then

    def finish(self) -> FairleadError | OSError | None:
        """Ends the save that `follow_with` announced.

        Runs what is still to follow, if the strategy wrote the checkpoint without its CheckpointIO.

        Returns:
            Why the save failed.  It was not raised, because Lightning's other ranks wait right behind the save.
        """
        then, self._then = self._then, None
        error, self._error = self._error, None
        if then is not None:
            try:
                then({})
            except (FairleadError, OSError) as raised:
                return raised
        return error

    def forget(self) -> None:
        """Takes back what `follow_with` announced: on another rank the save has failed."""
        self._then = self._error = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Saves, and commits when the file is durable."""
        then, self._then = self._then, None
        if then is None:
            self.inner.save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            if storage_options is None and isinstance(self.inner, DurableSaves):
                self.inner.submit(checkpoint, path, lambda digest: then({Path(path).name: digest} if digest else {}))
            else:
                self.inner.save_checkpoint(checkpoint, path, storage_options)
                then({})
        except (FairleadError, OSError) as error:
            self._error = error

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads through the backend."""
        return self.inner.load_checkpoint(path, map_location, weights_only)

    def load_shards(
        self, path: str | os.PathLike[str], place: PlaceTensor, weights_only: bool | None = None
    ) -> dict[str, Any] | None:
        """Loads shards through the backend, where it can; see `fairlead.interfaces.ShardedLoads`."""
        inner = self.inner
        return inner.load_shards(path, place, weights_only) if isinstance(inner, ShardedLoads) else None

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes through the backend."""
        self.inner.remove_checkpoint(path)

    def wait(self) -> None:
        """Returns when every save is durable and committed; raises what failed in the background."""
        if isinstance(self.inner, (DurableSaves, ShardedSaves)):
            self.inner.wait()

    def teardown(self) -> None:
        """Ends the backend's own threads or processes."""
        self.inner.teardown()


def copies_of(io: object) -> CheckpointCopies | None:
    """The backend that keeps copies of the checkpoints elsewhere, if this is one or passes on to one."""
    inner = io.inner if isinstance(io, CommittingIO) else io
    return inner if isinstance(inner, CheckpointCopies) else None


def raised_by(call: Callable[[], None]) -> FairleadError | OSError | None:
    """What a call raises, if that is an error of the disk or of ours."""
    try:
        call()
    except (FairleadError, OSError) as error:
        return error
    return None
