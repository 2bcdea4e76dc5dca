"""From a state to one durable file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fairlead.errors import CheckpointError, FairleadError
from fairlead_checkpoint_io.files.archive_writer import ArchiveWriter
from fairlead_runs.commit import FileHash, Syscalls, atomic_write, default_algorithm
from fairlead_runs.commit.files import disk_error, ensure_dir


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path as a local one.

    Raises:
        CheckpointError: It is a URL.
    """
    text = os.fspath(path)
    if "://" in text and not text.startswith("file://"):
        raise CheckpointError(
            "checkpoints are written to and read from local paths only",
            where=text,
            fix="copy the file to a local or shared file system and give its path",
        )
    return Path(text.removeprefix("file://"))


def write_state(state: dict[str, Any], path: Path, *, syscalls: Syscalls | None = None) -> FileHash:
    """Replaces `path` by a file with this state, atomically and durably; directories are made when missing.

    torch writes into a file object, so that the archive inside has a fixed name instead of the file's, and
    the memory of large tensors goes to the kernel as it is.

    Returns:
        The file's checksum, computed in passing.

    Raises:
        CheckpointError: The disk refused, or something in the state cannot be pickled. `path` is as before.
    """
    system = syscalls or Syscalls()
    try:
        ensure_dir(path.parent, system)
    except OSError as error:
        raise disk_error(error, f"cannot make the directory of {path.name}", path.parent) from error

    try:
        return atomic_write(
            path, lambda file: ArchiveWriter(file).add(state), algorithm=default_algorithm(), syscalls=system
        )
    except (FairleadError, OSError, MemoryError):
        raise
    except Exception as error:  # pickling calls the objects' own methods
        raise CheckpointError(
            f"cannot write {path.name}: something in the checkpoint cannot be pickled",
            where=str(path),
            why=f"{type(error).__name__}: {error}",
            fix="keep it out of the state (state_dict, on_save_checkpoint, save_hyperparameters)",
        ) from error
