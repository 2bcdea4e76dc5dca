"""Saves on all ranks together, each its own part, at once or in the background."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from fairlead.errors import CheckpointError, ConfigError
from fairlead.interfaces import BuildContext
from fairlead_checkpoint_io.distributed_shards import DistributedCheckpointIOConfig
from fairlead_checkpoint_io.distributed_shards.ranks import Ranks
from fairlead_checkpoint_io.distributed_shards.saving import Agreed, Then, agree, part, save
from fairlead_checkpoint_io.files.background import Background
from fairlead_checkpoint_io.files.layout import to_layout
from fairlead_checkpoint_io.files.snapshot import copied, on_host
from fairlead_checkpoint_io.files.writing import local_path
from fairlead_checkpoint_io.torch_file_runtime import TorchFileCheckpointIO, refuse_options
from fairlead_runs.checkpoint_io import PlaceTensor


def build(config: DistributedCheckpointIOConfig, context: BuildContext) -> DistributedCheckpointIO:
    """The runtime of the backend `distributed`.

    Raises:
        ConfigError: It is asked for by Fabric, which hands a CheckpointIO rank 0's state only.
    """
    if context.engine == "fabric":
        raise ConfigError(
            "checkpoint_io: distributed works with the Trainer only",
            where="trainer.checkpoint_io",
            why="Fabric calls a CheckpointIO on rank 0 only",
            fix="checkpoint_io: torch or async; strategy: fsdp2 has its own shards in Fabric",
        )
    return DistributedCheckpointIO(config)


class DistributedCheckpointIO(CheckpointIO):
    """A directory of shards: `submit_shards` is called on all ranks together, and all of them write.

    `save_checkpoint`, which Lightning calls on one rank, writes the same layout from that rank only.

    Args:
        config: The settings.

    Example:
        >>> io = DistributedCheckpointIO(DistributedCheckpointIOConfig())                    # doctest: +SKIP
        >>> io.submit_shards(trainer_checkpoint, path, lambda hashes: None, names=[names])   # doctest: +SKIP
    """

    def __init__(self, config: DistributedCheckpointIOConfig) -> None:
        super().__init__()
        self._config = config
        self._files = TorchFileCheckpointIO(config)
        self._background = Background(config.max_in_flight)
        self._ranks: Ranks | None = None
        self._agreed: Agreed | None = None

    def meet(self) -> None:
        """Makes the groups in which the ranks talk about saves; on all ranks, when the training is not talking."""
        if self._ranks is None or not self._ranks.usable:
            overlapping = self._config.background and self._config.max_in_flight > 1
            self._ranks, self._agreed = Ranks(self._config.timeout, overlapping=overlapping), None

    def submit_shards(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        then: Then,
        *,
        names: Sequence[Sequence[str | None]],
    ) -> None:
        """Saves on all ranks, then calls `then` on rank 0; see `fairlead.interfaces.ShardedSaves`."""
        target = local_path(path)
        self.meet()
        ranks = self._ranks
        assert ranks is not None
        if self._config.background:
            self._in_background(checkpoint, target, then, names, ranks)
            return
        with _about(target):
            layout, agreed = agree(lambda: to_layout(checkpoint, names), ranks, self._agreed)
            self._agreed = agreed
            save(target, ranks, agreed, lambda: on_host(part(layout, agreed, ranks)).state, then)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Replaces `path` by a directory with this checkpoint, written by this rank only, before it returns.

        Raises:
            CheckpointError: It could not be written; what was at `path` before is still there.
            ConfigError: `storage_options` were given; there are none.
        """
        refuse_options(storage_options)
        target, ranks = local_path(path), Ranks(self._config.timeout, single=True)
        with _about(target):
            layout, agreed = agree(lambda: to_layout(checkpoint, ()), ranks, None)
            save(target, ranks, agreed, lambda: on_host(part(layout, agreed, ranks)).state, lambda hashes: None)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads the whole state, from a directory of shards or a plain file, after the saves in flight."""
        self._background.drain()
        return self._files.load_checkpoint(path, map_location=map_location, weights_only=weights_only)

    def load_shards(
        self, path: str | os.PathLike[str], place: PlaceTensor, weights_only: bool | None = None
    ) -> dict[str, Any] | None:
        """Loads what this rank needs; see `fairlead.interfaces.ShardedLoads`."""
        self._background.drain()
        return self._files.load_shards(path, place, weights_only)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Deletes a directory or file as a whole; one that is gone already is no error."""
        if self._config.background:
            self._background.remove(local_path(path), lambda: self._files.remove_checkpoint(path))
        else:
            self._files.remove_checkpoint(path)

    def wait(self) -> None:
        """Returns when all that was saved is durable; raises what was not."""
        self._background.finish()

    def teardown(self) -> None:
        """Finishes all saves and frees the buffers; raises what was not written. The next save starts afresh."""
        self._agreed = None
        self._background.close()

    def __getstate__(self) -> dict[str, Any]:
        """To another process (`ddp_spawn`) go the settings, not the groups."""
        return {**self.__dict__, "_ranks": None, "_agreed": None}

    def _in_background(
        self,
        checkpoint: dict[str, Any],
        target: Path,
        then: Then,
        names: Sequence[Sequence[str | None]],
        ranks: Ranks,
    ) -> None:
        arena = self._background.begin()
        try:
            with _about(target):
                layout, agreed = agree(lambda: to_layout(checkpoint, names), ranks, self._agreed)
        except BaseException:
            self._background.abandon(arena)
            raise
        self._agreed = agreed
        copy: dict[str, Any] | Exception
        try:
            copy = copied(part(layout, agreed, ranks), arena).state
        except Exception as error:  # the other ranks hear of it, in the thread that writes
            copy = error

        def state() -> dict[str, Any]:
            if isinstance(copy, Exception):
                raise copy
            arena.synchronize()
            return copy

        self._background.save(target, lambda: save(target, ranks, agreed, state, then), arena)


@contextmanager
def _about(target: Path) -> Iterator[None]:
    """Says of each error which checkpoint it is about."""
    try:
        yield
    except CheckpointError as error:
        error.where = str(target)
        raise
