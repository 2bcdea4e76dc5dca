"""Saves through another backend, and has every committed checkpoint copied to an object store."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lightning.fabric.plugins import CheckpointIO

from fairlead.interfaces import BuildContext
from fairlead_checkpoint_io.async_file_runtime import build_inner
from fairlead_checkpoint_io.remote import RemoteCheckpointIOConfig
from fairlead_checkpoint_io.remote.mirror import Mirror
from fairlead_runs import Fingerprint
from fairlead_runs.checkpoint_io import DurableSaves, PlaceTensor, ShardedLoads, ShardedSaves
from fairlead_runs.commit import Checkpoint, Fence, FileHash, RetentionPolicy
from fairlead_runs.remote import Store, fetch, is_url, split_checkpoint_url

_TRIES_AT_START: Final = 3  # a person may be waiting


def build(config: RemoteCheckpointIOConfig, context: BuildContext) -> RemoteCheckpointIO:
    """The runtime of the backend `remote`, around that of `config.inner`, whose engine may be missing."""
    inner = build_inner(config.inner, context)
    return RemoteShardsIO(config, inner) if isinstance(inner, ShardedSaves) else RemoteCheckpointIO(config, inner)


class RemoteCheckpointIO(CheckpointIO):
    """Saves and loads through another backend, copies what is committed (`CheckpointCopies`), loads from URLs too."""

    def __init__(self, config: RemoteCheckpointIOConfig, inner: CheckpointIO) -> None:
        super().__init__()
        self._config = config
        self._inner = inner
        self._mirror: Mirror | None = None

    # -- a Lightning CheckpointIO

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
            local = fetch(text, Path(folder), store=self._store(run))
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
            if self._mirror is not None:
                self._mirror.close()

    def __getstate__(self) -> dict[str, Any]:
        """To another process (`ddp_spawn`) go the settings, not threads."""
        return {**self.__dict__, "_mirror": None}

    # -- copies; see `CheckpointCopies`

    @property
    def stop_wait_s(self) -> float:
        """For how long a stop waits."""
        return self._config.stop_wait_s

    def open(self, name: str, fingerprint: Fingerprint, *, new: bool = False) -> int:
        """Looks at the run's URL; see the protocol."""
        url = f"{self._config.url.rstrip('/')}/{name}"
        mirror = Mirror(self._config, self._store(url), self._store(url, at_most=_TRIES_AT_START))
        mirror.remote.check(fingerprint, new=new)
        self._mirror = mirror
        return mirror.remote.last_start()

    def fetch(self, run: Path) -> list[str]:
        """Brings what the run directory lacks; see the protocol."""
        assert self._mirror is not None, "call open() first"
        return self._mirror.remote.fetch(run)

    def begin(self, run: Path, start: int, event: Callable[..., None], fence: Fence) -> None:
        """This start uploads from now on; see the protocol."""
        assert self._mirror is not None, "call open() first"
        self._mirror.begin(run, start, event, fence)

    def committed(self, checkpoint: Checkpoint, policy: RetentionPolicy) -> None:
        """Has a published checkpoint uploaded; see the protocol."""
        if self._mirror is not None:
            self._mirror.committed(checkpoint, policy)

    def wait_uploaded(self, timeout_s: float | None = None) -> str | None:
        """Waits for the uploads; see the protocol."""
        return self._mirror.wait_uploaded(timeout_s) if self._mirror is not None else None

    def _store(self, url: str, *, at_most: int | None = None) -> Store:
        tries = self._config.retries if at_most is None else min(at_most, self._config.retries)
        return Store.open(url, self._config.storage_options, tries=tries, part_mib=self._config.part_mib)


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
