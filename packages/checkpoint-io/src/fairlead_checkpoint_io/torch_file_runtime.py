"""Writes and reads checkpoints as single files."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from fairlead.errors import ConfigError
from fairlead.interfaces import BuildContext
from fairlead_checkpoint_io.files.reading import read_sharded, read_state
from fairlead_checkpoint_io.files.snapshot import Snapshot, on_host
from fairlead_checkpoint_io.files.trust import unsafe_globals
from fairlead_checkpoint_io.files.writing import local_path, write_state
from fairlead_checkpoint_io.torch_file import FileCheckpointIOConfig
from fairlead_runs.checkpoint_io import PlaceTensor
from fairlead_runs.commit import FileHash, Syscalls
from fairlead_runs.commit.checkpoints import to_trash
from fairlead_runs.commit.files import disk_error, remove_tree

log = logging.getLogger("fairlead.checkpoint_io")


def build(config: FileCheckpointIOConfig, context: BuildContext) -> TorchFileCheckpointIO:
    """The runtime of the backend `torch`."""
    return TorchFileCheckpointIO(config)


class TorchFileCheckpointIO(CheckpointIO):
    """One file per checkpoint, complete and durable when `save_checkpoint` returns; called on rank 0 only.

    Equal states give equal bytes, whatever the file is called and on whichever device the tensors are.
    """

    def __init__(self, config: FileCheckpointIOConfig) -> None:
        super().__init__()
        self._config = config
        self._warned: set[str] = set()
        self._digest: FileHash | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Replaces `path` by a file with this checkpoint; when that fails, what was there still is."""
        refuse_options(storage_options)
        target = local_path(path)
        snapshot = self._on_host(checkpoint)
        self._digest = write_state(snapshot.state, target)
        if snapshot.foreign:
            names = unsafe_globals(target, self._config.safe_globals)
            if not self._warned.issuperset(names):
                self._warned.update(names)
                log.warning(
                    "%s holds objects that are not loaded by default: %s. To resume from it, keep them out of the "
                    "state, or set checkpoint_io.safe_globals to these names.",
                    target,
                    ", ".join(names),
                )

    def submit(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], then: Callable[[FileHash | None], None]
    ) -> None:
        """Saves, then calls `then`; see `DurableSaves`."""
        self._digest = None
        self.save_checkpoint(checkpoint, os.fspath(path))
        then(self._digest)

    def wait(self) -> None:
        """Returns at once: nothing is ever pending."""

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a file, or the state of a checkpoint directory; into host memory unless `map_location` says where."""
        return read_state(local_path(path), map_location=map_location, **self._options(weights_only))

    def load_shards(
        self, path: str | os.PathLike[str], place: PlaceTensor, weights_only: bool | None = None
    ) -> dict[str, Any] | None:
        """Loads from a directory of shards what this rank needs; see `ShardedLoads`."""
        return read_sharded(local_path(path), place=place, **self._options(weights_only))

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Deletes a file, or a complete directory; one that is gone already is no error."""
        target, system = local_path(path), Syscalls()
        try:
            if target.is_dir() and not target.is_symlink():
                target = to_trash(target, system)  # a kill in between leaves no half of a checkpoint
            remove_tree(target, system)
        except FileNotFoundError:
            return
        except OSError as error:
            raise disk_error(error, "cannot delete a checkpoint", target) from error

    def _options(self, weights_only: bool | None) -> dict[str, Any]:
        config = self._config
        return {"weights_only": weights_only, "safe_globals": config.safe_globals, "verify": config.verify}

    def _on_host(self, checkpoint: dict[str, Any]) -> Snapshot:
        return on_host(checkpoint)


def refuse_options(storage_options: Any | None) -> None:
    """Raises when somebody expects options to be used."""
    if storage_options is not None:
        raise ConfigError(
            "save_checkpoint got storage_options, but this backend has none",
            fix="leave storage_options out; settings are fields of `trainer.checkpoint_io`",
        )
