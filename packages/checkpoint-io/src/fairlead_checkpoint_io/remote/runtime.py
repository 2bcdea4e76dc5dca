"""Saves through another backend, and has every committed checkpoint copied to an object store."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from fairlead.interfaces import BuildContext
from fairlead_checkpoint_io.async_file_runtime import build_inner
from fairlead_checkpoint_io.remote import RemoteCheckpointIOConfig
from fairlead_checkpoint_io.remote.copies import StoreCopies
from fairlead_runs.checkpoint_io import DurableSaves, PlaceTensor, ShardedLoads, ShardedSaves
from fairlead_runs.commit import FileHash
from fairlead_runs.remote import fetch, is_url, split_checkpoint_url


def build(config: RemoteCheckpointIOConfig, context: BuildContext) -> RemoteCheckpointIO:
    """The runtime of the backend `remote`, around that of `config.inner`, whose engine may be missing."""
    inner = build_inner(config.inner, context)
    return RemoteShardsIO(config, inner) if isinstance(inner, ShardedSaves) else RemoteCheckpointIO(config, inner)


class RemoteCheckpointIO(StoreCopies, CheckpointIO):
    """Saves and loads through another backend, copies what is committed, loads from URLs too."""

    def __init__(self, config: RemoteCheckpointIOConfig, inner: CheckpointIO) -> None:
        super().__init__(config)
        self._inner = inner

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Writes a local file through the inner backend."""
        self._inner.save_checkpoint(checkpoint, os.fspath(path), storage_options)

    def submit(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], then: Callable[[FileHash | None], None]
    ) -> None:
        """Writes a local file, and calls `then`; see `DurableSaves`."""
        if isinstance(self._inner, DurableSaves):
            self._inner.submit(checkpoint, path, then)
        else:
            self._inner.save_checkpoint(checkpoint, os.fspath(path))
            then(None)

    def wait(self) -> None:
        """Returns when all local files are durable; for their copies there is `wait_uploaded`."""
        if isinstance(self._inner, (DurableSaves, ShardedSaves)):
            self._inner.wait()

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a local file, or the URL of a checkpoint, which is downloaded and compared with its manifest."""
        text = os.fspath(path)
        if not is_url(text):
            return self._inner.load_checkpoint(text, map_location=map_location, weights_only=weights_only)
        run, _ = split_checkpoint_url(text)
        with tempfile.TemporaryDirectory(prefix="fairlead-") as folder:
            local = fetch(text, Path(folder), store=self.store(run))
            return self._inner.load_checkpoint(str(local.path), map_location=map_location, weights_only=weights_only)

    def load_shards(
        self, path: str | os.PathLike[str], place: PlaceTensor, weights_only: bool | None = None
    ) -> dict[str, Any] | None:
        """Loads local shards through the inner backend, where it can; see `ShardedLoads`."""
        inner = self._inner
        return inner.load_shards(path, place, weights_only) if isinstance(inner, ShardedLoads) else None

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Deletes a local file; the store has the retention of the run."""
        self._inner.remove_checkpoint(os.fspath(path))

    def teardown(self) -> None:
        """Ends the inner backend; what is still being uploaded gets a last `stop_wait_s`."""
        try:
            self._inner.teardown()
        finally:
            self.close()


class RemoteShardsIO(RemoteCheckpointIO):
    """Around a backend that saves on all ranks together; then this is a `ShardedSaves`, too."""

    def __init__(self, config: RemoteCheckpointIOConfig, inner: Any) -> None:
        super().__init__(config, inner)
        self._shards: ShardedSaves = inner

    def meet(self) -> None:
        """Makes what the ranks need to talk to each other."""
        self._shards.meet()

    def submit_shards(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        then: Callable[[Mapping[str, FileHash]], None],
        *,
        names: Sequence[Sequence[str | None]],
    ) -> None:
        """Saves on all ranks, then calls `then` on rank 0; see the protocol."""
        self._shards.submit_shards(checkpoint, path, then, names=names)
