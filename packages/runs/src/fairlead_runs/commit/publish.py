"""Writing a checkpoint: a stage that all ranks fill, and the one rename that makes it count."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from fairlead.errors import CheckpointError, FairleadError
from fairlead_runs.commit.checkpoints import LATEST, NAME, STAGE, Checkpoint, list_checkpoints, to_trash
from fairlead_runs.commit.fence import Fence
from fairlead_runs.commit.files import (
    FileHash,
    Syscalls,
    atomic_write,
    disk_error,
    ensure_dir,
    fenced_rename,
    hash_file,
    remove_tree,
    write_file,
)
from fairlead_runs.commit.manifest import MANIFEST, Manifest, is_inside, verify

_TOKEN = re.compile(r"[A-Za-z0-9_-]+")


def stage(root: Path, name: str, *, token: str, syscalls: Syscalls | None = None) -> Path:
    """The directory in which the files of one checkpoint are gathered; every rank may call this.

    Args:
        root: The `checkpoints` directory; made when missing.
        name: `checkpoint_name(step)`.
        token: Letters, digits, `-` and `_`, equal on all ranks of one start of the run and different for
            each start (`s3`), so that remains of a killed start are never mixed into this one.
    """
    system = syscalls or Syscalls()
    if not NAME.fullmatch(name) or not _TOKEN.fullmatch(token):
        raise CheckpointError(f"not a checkpoint's name or token: {name!r}, {token!r}", fix="use checkpoint_name(step)")
    path = root / f"{STAGE}{name}.{token}"
    try:
        ensure_dir(root, system)
        if not path.is_dir():
            with contextlib.suppress(FileExistsError):  # another rank was faster
                system.mkdir(path)
    except OSError as error:
        raise disk_error(error, "cannot begin a checkpoint", root) from error
    return path


def abandon(stage_dir: Path, *, syscalls: Syscalls | None = None) -> None:
    """Deletes a stage that will not be published; call it once all its writers have ended."""
    try:
        remove_tree(stage_dir, syscalls or Syscalls())
    except OSError as error:
        raise disk_error(error, "cannot delete an unfinished checkpoint", stage_dir) from error


def publish(
    stage_dir: Path,
    metadata: Mapping[str, Any],
    *,
    hashes: Mapping[str, FileHash] | None = None,
    files: Iterable[str] | None = None,
    fence: Fence | None = None,
    syscalls: Syscalls | None = None,
) -> Checkpoint:
    """Makes a stage the newest complete checkpoint; called by one process, after all writers have ended.

    When this returns, the checkpoint survives a power cut; only then may anything older be deleted.  A step that has a
    complete one already becomes `step-00000200.2`: replacing a directory is not atomic.

    Args:
        stage_dir: What `stage` returned.
        metadata: Primitives: `step`, `epoch`, `start` (the number of this start of the run: it orders
            checkpoints), `metrics`, config hash, world size, ...
        hashes: Checksums that the writers computed in passing, by path inside the stage.  Files without
            one (of engines that write by themselves) are fsynced and hashed here.
        files: What must be there, exactly; None: whatever is there.  Another file is deleted.
        fence: That of the run's lock, where it has one.

    Raises:
        RunLockedError: This start was replaced by another one; nothing has changed.
        CheckpointError: The disk refused, or a file is missing or not what its writer reported.  The stage
            is deleted (a full disk needs its space) and the previous checkpoint stays.
    """
    system = syscalls or Syscalls()
    known = dict(hashes or {})
    name = stage_dir.name.removeprefix(STAGE).rpartition(".")[0]
    match = NAME.fullmatch(name)
    if match is None:
        raise CheckpointError("not a stage", where=str(stage_dir), fix="call stage() first")
    root = stage_dir.parent
    try:
        found = _collect(stage_dir, known, None if files is None else set(files), system)
        content = Manifest.now(found, metadata)
        write_file(stage_dir / MANIFEST, content.dump(), syscalls=system)
        for directory in _directories(stage_dir, found):
            system.fsync_dir(directory)
        target = _free_name(root, name, system, fence)
        fenced_rename(stage_dir, target, system, fence)
    except (OSError, FairleadError) as raised:
        error = (fence.why_lost() if fence is not None else None) or raised
        failure = disk_error(error, "cannot save a checkpoint", root) if isinstance(error, OSError) else error
        try:
            remove_tree(stage_dir, system)
        except OSError as second:
            failure.add_note(f"its remains could not be deleted either: {stage_dir}: {second.strerror}")
        raise failure from error
    try:
        system.fsync_dir(root)
    except OSError as error:
        raise disk_error(error, "a checkpoint is written, but may not survive a power cut", target) from error
    atomic_write(root / LATEST, f"{target.name}\n".encode(), syscalls=system, fence=fence)
    return Checkpoint.at(target)


def _collect(
    stage_dir: Path, known: Mapping[str, FileHash], wanted: set[str] | None, system: Syscalls
) -> dict[str, FileHash]:
    for name in itertools.chain(known, wanted or ()):
        if not is_inside(name) or name == MANIFEST:
            raise CheckpointError(f"not a file name inside a checkpoint: {name!r}", where=str(stage_dir))
    present = _walk(stage_dir)
    # The reported names are added: a directory listing of a network file system may be older than they are.
    names = (present | known.keys()) - {MANIFEST} if wanted is None else wanted
    if not names:
        raise CheckpointError("nothing was written into a checkpoint", where=str(stage_dir))
    for extra in sorted(present - names - {MANIFEST}):
        system.unlink(stage_dir / extra)
    found = {}
    for name in sorted(names):
        try:
            found[name] = _checked(stage_dir / name, known.get(name), system)
        except FileNotFoundError:
            raise CheckpointError(
                f"a checkpoint's file is missing: {name}", where=str(stage_dir), why="its rank did not write it"
            ) from None
    return found


def _checked(path: Path, expected: FileHash | None, system: Syscalls) -> FileHash:
    if expected is None:
        return hash_file(path, sync=True, syscalls=system)
    fd = system.open(path, os.O_RDONLY)  # opening makes a network file system ask its server for the size
    try:
        status = os.fstat(fd)
    finally:
        system.close(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size != expected.size:
        raise CheckpointError(
            f"a checkpoint's file has {status.st_size} bytes, its writer reported {expected.size}", where=str(path)
        )
    return expected


def _walk(stage_dir: Path) -> set[str]:
    found = set()
    for folder, folders, names in os.walk(stage_dir):
        for name in (*names, *(f for f in folders if os.path.islink(os.path.join(folder, f)))):
            path = Path(folder, name)
            if path.is_symlink():
                raise CheckpointError("a checkpoint holds a symbolic link", where=str(path), fix="write a file")
            found.add(path.relative_to(stage_dir).as_posix())
    return found


def _directories(stage_dir: Path, files: Iterable[str]) -> list[Path]:
    """All directories of a stage, the inner ones first."""
    folders = {stage_dir}
    for name in files:
        folders.update(stage_dir / parent for parent in PurePosixPath(name).parents)
    return sorted(folders, key=lambda folder: len(folder.parts), reverse=True)


def _free_name(root: Path, name: str, system: Syscalls, fence: Fence | None) -> Path:
    """Behind all that are there of the same step: the highest version is the newest, also where a lower one is free."""
    here = [one for one in list_checkpoints(root) if one.path.name.partition(".")[0] == name]
    for version in itertools.count(max((one.version for one in here), default=1)):
        target = root / (name if version == 1 else f"{name}.{version}")
        if not target.exists():
            return target
        if verify(target):  # damaged, so nothing is lost with it
            to_trash(target, system, fence)
            return target
    raise AssertionError("unreachable")
