"""Saves on all ranks together, each its own part, at once or in the background."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from fairlead.errors import ConfigError
from fairlead.interfaces import BuildContext
from fairlead_checkpoint_io.async_file_runtime import BackgroundCheckpointIO
from fairlead_checkpoint_io.distributed_shards import DistributedCheckpointIOConfig
from fairlead_checkpoint_io.distributed_shards.saving import Agreed, Ranks, Then, about, agree, part, save
from fairlead_checkpoint_io.files.layout import to_layout
from fairlead_checkpoint_io.files.snapshot import copied, on_host
from fairlead_checkpoint_io.files.writing import local_path
from fairlead_checkpoint_io.torch_file_runtime import TorchFileCheckpointIO, refuse_options


def build(config: DistributedCheckpointIOConfig, context: BuildContext) -> DistributedCheckpointIO:
    """The runtime of the backend `distributed`; refused in Fabric, which hands a CheckpointIO rank 0's state only."""
    if context.engine == "fabric":
        raise ConfigError(
            "checkpoint_io: distributed works with the Trainer only",
            where="trainer.checkpoint_io",
            why="Fabric calls a CheckpointIO on rank 0 only",
            fix="checkpoint_io: torch or async; strategy: fsdp2 has its own shards in Fabric",
        )
    return DistributedCheckpointIO(config)


class DistributedCheckpointIO(BackgroundCheckpointIO):
    """A directory of shards: `submit_shards` is called on all ranks together, and all of them write."""

    def __init__(self, config: DistributedCheckpointIOConfig) -> None:
        super().__init__(TorchFileCheckpointIO(config), config.max_in_flight)
        self._config = config
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
        """Saves on all ranks, then calls `then` on rank 0; see `ShardedSaves`."""
        target = local_path(path)
        self.meet()
        ranks = self._ranks
        assert ranks is not None
        arena = self._background.begin() if self._config.background else None
        try:
            with about(target):
                layout, agreed = agree(lambda: to_layout(checkpoint, names), ranks, self._agreed)
                self._agreed = agreed
                if arena is None:
                    save(target, ranks, agreed, lambda: on_host(part(layout, agreed, ranks)).state, then)
                    return
        except BaseException:
            if arena is not None:
                self._background.abandon(arena)
            raise
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

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Replaces `path` by a directory in the same layout, written by this rank only, as Lightning calls it."""
        refuse_options(storage_options)
        target, ranks = local_path(path), Ranks(self._config.timeout, single=True)
        with about(target):
            layout, agreed = agree(lambda: to_layout(checkpoint, ()), ranks, None)
            save(target, ranks, agreed, lambda: on_host(part(layout, agreed, ranks)).state, lambda hashes: None)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Deletes a file or a complete directory; one that is gone already is no error."""
        if self._config.background:
            super().remove_checkpoint(path)
        else:
            self._inner.remove_checkpoint(os.fspath(path))

    def teardown(self) -> None:
        """Also forgets what the ranks have agreed on."""
        self._agreed = None
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        """To another process (`ddp_spawn`) go the settings, not the groups."""
        return {**self.__dict__, "_ranks": None, "_agreed": None}
