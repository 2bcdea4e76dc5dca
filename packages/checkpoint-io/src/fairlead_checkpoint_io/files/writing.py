"""From a state to one durable file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fairlead.errors import CheckpointError, FairleadError
from fairlead_checkpoint_io.files.archive_writer import ArchiveWriter
from fairlead_runs.commit import FileHash, Syscalls, atomic_write, default_algorithm
from fairlead_runs.commit.checkpoints import to_trash
from fairlead_runs.commit.files import disk_error, ensure_dir, remove_tree


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path as a local one; a URL is refused."""
    text = os.fspath(path)
    if "://" in text and not text.startswith("file://"):
        what = "checkpoints are written to and read from local paths only"
        raise CheckpointError(what, where=text, fix="copy the file to a local or shared file system")
    return Path(text.removeprefix("file://"))


def replace_with(staged: Path, target: Path, system: Syscalls) -> None:
    """Gives what is staged its name; the old one goes only after that is durable, and is never half there."""
    trash = None
    if os.path.lexists(target) and (os.path.isdir(target) or staged.is_dir()):
        trash = to_trash(target, system)  # folders take two renames
    try:
        system.rename(staged, target)
    except OSError:
        if trash is not None:
            system.rename(trash, target)
        raise
    system.fsync_dir(target.parent)
    if trash is not None:
        remove_tree(trash, system)


def write_state(state: dict[str, Any], path: Path, *, syscalls: Syscalls | None = None) -> FileHash:
    """Replaces `path` by a file with this state, atomically and durably, and gives its checksum.

    torch writes into a file object, so that the archive inside has a fixed name instead of the file's.
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
