"""Saves in the background: the loop waits for a copy in host memory, another thread writes it."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from fairlead.config_bases import CheckpointIOConfigBase
from fairlead.errors import PluginError
from fairlead.interfaces import BuildContext
from fairlead_checkpoint_io.async_file import AsyncCheckpointIOConfig
from fairlead_checkpoint_io.files.background import Background
from fairlead_checkpoint_io.files.snapshot import copied
from fairlead_checkpoint_io.files.writing import local_path
from fairlead_checkpoint_io.torch_file_runtime import refuse_options
from fairlead_runs.checkpoint_io import DurableSaves, PlaceTensor, ShardedLoads
from fairlead_runs.commit import FileHash


def build(config: AsyncCheckpointIOConfig, context: BuildContext) -> AsyncFileCheckpointIO:
    """The runtime of the backend `async`, around that of `config.inner`, whose engine may be missing."""
    return AsyncFileCheckpointIO(build_inner(config.inner, context), config.max_in_flight)


def build_inner(config: CheckpointIOConfigBase, context: BuildContext) -> CheckpointIO:
    """The runtime of the backend in the field `inner` of another one; raises when its engine is not installed."""
    where = "trainer.checkpoint_io.inner"
    plugin = context.plugins.of(config)
    context.plugins.require_engines("checkpoint_io", config.name, where=where)
    if plugin.runtime is None:
        raise PluginError(f"the checkpoint_io {config.name!r} has no runtime", where=where)
    runtime: CheckpointIO = pkgutil.resolve_name(plugin.runtime)(config, context)
    return runtime


class BackgroundCheckpointIO(CheckpointIO):
    """Saves through another backend, or beside it, in one thread, in order; everything else waits for the saves.

    A failed save is logged at once and raised once: by the next save (which is accepted all the same), by
    `wait` or by `teardown`.  A checkpoint is deleted only after the saves before it have ended, and retained
    when the last of them failed, so that a full disk does not cost the last good one.
    """

    def __init__(self, inner: CheckpointIO, max_in_flight: int = 1) -> None:
        super().__init__()
        self._inner = inner
        self._background = Background(max_in_flight)

    def wait(self) -> None:
        """Returns when all that was saved is durable; raises what was not."""
        self._background.finish()

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads through the inner backend, after the saves in flight."""
        self._background.drain()
        return self._inner.load_checkpoint(os.fspath(path), map_location=map_location, weights_only=weights_only)

    def load_shards(
        self, path: str | os.PathLike[str], place: PlaceTensor, weights_only: bool | None = None
    ) -> dict[str, Any] | None:
        """Loads a directory of shards through the inner backend, where that can; see `ShardedLoads`."""
        self._background.drain()
        inner = self._inner
        return inner.load_shards(path, place, weights_only) if isinstance(inner, ShardedLoads) else None

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Deletes a checkpoint behind the saves in flight; it stays when the newest of them fails."""
        self._background.remove(local_path(path), lambda: self._inner.remove_checkpoint(os.fspath(path)))

    def teardown(self) -> None:
        """Finishes all saves and frees the buffers; raises what was not written. The next save starts afresh."""
        try:
            self._background.close()
        finally:
            self._inner.teardown()


class AsyncFileCheckpointIO(BackgroundCheckpointIO):
    """Calls the `save_checkpoint` of another backend in the thread; that must not keep what it is given."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Copies the checkpoint and returns; raises when that cannot be done, or an earlier one was not written."""
        refuse_options(storage_options)
        self.submit(checkpoint, os.fspath(path), lambda _: None)

    def submit(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], then: Callable[[FileHash | None], None]
    ) -> None:
        """Saves, and calls `then` in the writing thread; see `DurableSaves`."""
        target, arena = local_path(path), self._background.begin()
        try:
            state = copied(checkpoint, arena).state
        except BaseException:
            self._background.abandon(arena)
            raise

        def write() -> None:
            arena.synchronize()
            if isinstance(self._inner, DurableSaves):
                self._inner.submit(state, target, then)
                self._inner.wait()
            else:
                self._inner.save_checkpoint(state, target)
                then(None)

        self._background.save(target, write, arena)
