"""Checkpoints as directories: listed, the newest complete one found, what killed writers left cleaned away."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from fairlead.errors import CheckpointError, FairleadError
from fairlead_runs.commit.fence import Fence
from fairlead_runs.commit.files import Syscalls, disk_error, fenced_rename, remove_tree
from fairlead_runs.commit.manifest import MANIFEST, Damage, Manifest, read_manifest, verify

LATEST = "latest"
NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
STAGE = ".stage-"
TRASH = ".trash-"
TEMPORARY = ".tmp-"


class Rated:
    """What is compared of checkpoints, here or on a store."""

    step: int
    version: int

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The writer's metadata: step, epoch, metrics, ..."""
        raise NotImplementedError

    @property
    def created(self) -> str:
        """When it was written, UTC, ISO 8601."""
        raise NotImplementedError

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts by age: a later start of the run is newer, also when it went back to an earlier step."""
        start = self.metadata.get("start", 0)
        return (start if isinstance(start, int) else 0, self.step, self.version)


C = TypeVar("C", bound=Rated)


@dataclass(frozen=True)
class Checkpoint(Rated):
    """A published checkpoint directory; its manifest is read on first use.

    Attributes:
        path: The directory.
        step: The training step in its name.
        version: 1, or n for the n-th checkpoint of one step (`step-00000200.2`).
    """

    path: Path
    step: int
    version: int = 1

    @classmethod
    def at(cls, path: Path) -> Checkpoint:
        """The checkpoint at this path, by its name alone; `CheckpointError` where that is none of a checkpoint."""
        match = NAME.fullmatch(path.name)
        if match is None:
            raise CheckpointError("not a checkpoint's name", where=str(path), why="they are named step-00000200")
        return cls(path, int(match[1]), int(match[2] or 1))

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.name

    @cached_property
    def manifest(self) -> Manifest:
        """Its manifest; `CheckpointError` where that is damaged or gone."""
        return read_manifest(self.path)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The writer's metadata: step, epoch, metrics, ..."""
        return self.manifest.metadata

    @property
    def created(self) -> str:
        """When it was written, UTC, ISO 8601."""
        return self.manifest.created


@dataclass(frozen=True)
class Newest(Generic[C]):
    """The newest complete checkpoint (None: there is none), here or on a store, and why others were passed over."""

    checkpoint: C | None
    skipped: list[Damage]

    @classmethod
    def of(cls, candidates: Iterable[C], damages: Callable[[C], list[Damage]], skipped: Iterable[Damage] = ()) -> Self:
        """The newest candidate without damage; `skipped` was passed over before."""
        passed = list(skipped)
        for candidate in sorted(candidates, key=lambda item: item.order, reverse=True):
            found = damages(candidate)
            if not found:
                return cls(candidate, passed)
            passed += found
        return cls(None, passed)


def checkpoint_name(step: int) -> str:
    """The directory name of a step's checkpoint: `step-00000200`."""
    return f"step-{step:08d}"


def list_checkpoints(root: Path) -> list[Checkpoint]:
    """The published checkpoints by step, none where there is no such directory; no manifest is read."""
    found = (checkpoint for checkpoint in _named(root) if (checkpoint.path / MANIFEST).exists())
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.version))


def readable_checkpoints(root: Path) -> list[Checkpoint]:
    """Those whose manifest is sound, the oldest first; `newest_complete` reports the others."""
    return sorted(_readable(root)[0], key=lambda checkpoint: checkpoint.order)


def read_latest(root: Path) -> str | None:
    """The name in the file `latest`; None when there is none.  A hint for people and scripts, never trusted here."""
    try:
        return (root / LATEST).read_text(encoding="utf-8", errors="replace").strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise disk_error(error, "cannot read which checkpoint is the latest", root / LATEST) from error


def newest_complete(
    root: Path, *, deep: bool = False, check: Callable[[Path], list[Damage]] | None = None
) -> Newest[Checkpoint]:
    """The newest checkpoint that is complete, and what had to be passed over.

    Manifests decide, not `latest`: after a kill it is one commit behind, or names what was damaged since.

    Args:
        root: The `checkpoints` directory.
        deep: Also compare the files' checksums, not only their sizes.
        check: Says what is wrong with a checkpoint, instead of `verify`.

    Example:
        >>> for damage in newest_complete(Path("runs/gpt/checkpoints")).skipped:
        ...     print(f"passed over {damage}")
    """
    readable, skipped = _readable(root)
    latest = read_latest(root)
    if latest is not None and not (root / latest).is_dir():
        skipped.append(Damage(root / latest, None, "`latest` names it, but it is not there"))
    look = check if check is not None else partial(verify, deep=deep)
    return Newest.of(readable, lambda checkpoint: look(checkpoint.path), skipped)


def discard_incomplete(root: Path, *, token: str, syscalls: Syscalls | None = None) -> list[Path]:
    """Deletes what killed writers left behind, and returns it: stages, temporary files, half-deleted checkpoints.

    `token` is that of this start, whose stages stay; all others are dead, as the caller holds the run's lock.  It comes
    before the newest checkpoint is looked for: an owner that is only frozen has nothing left then that it could rename.
    """
    system = syscalls or Syscalls()
    deleted = []
    try:
        for name in sorted(os.listdir(root)):
            own = name.startswith(STAGE) and name.endswith(f".{token}")
            if name.startswith((STAGE, TRASH, TEMPORARY)) and not own:
                gone = root / f"{TRASH}{secrets.token_hex(6)}"  # at once, whoever may still be writing into it
                with contextlib.suppress(FileNotFoundError):  # its owner was alive, and has published or deleted it
                    system.rename(root / name, gone)
                    remove_tree(gone, system)
                    deleted.append(root / name)
    except FileNotFoundError:
        return deleted
    except OSError as error:
        raise disk_error(error, "cannot delete unfinished checkpoints", root) from error
    return deleted


def to_trash(path: Path, system: Syscalls, fence: Fence | None = None) -> Path:
    """Takes a checkpoint out of the listing with one rename, so that a kill leaves no half of it; what to delete.

    It goes into a folder of this start's: the next owner of the run deletes that, and no rename into it succeeds then.
    """
    trash = path.with_name(f"{TRASH}{path.name}.{secrets.token_hex(4)}")
    system.mkdir(trash)
    try:
        fenced_rename(path, trash / path.name, system, fence)
    except (OSError, FairleadError):
        with contextlib.suppress(OSError):
            system.rmdir(trash)
        raise
    system.fsync_dir(path.parent)
    return trash


def _readable(root: Path) -> tuple[list[Checkpoint], list[Damage]]:
    """Those with a sound manifest, and what is wrong with the others."""
    readable, damages = [], []
    for checkpoint in _named(root):
        try:
            _ = checkpoint.order
            readable.append(checkpoint)
        except CheckpointError as error:
            if checkpoint.path.is_dir():  # otherwise retention deleted it while we were looking
                damages.append(Damage(checkpoint.path, None, error.why or error.what))
    return readable, damages


def _named(root: Path) -> list[Checkpoint]:
    """All that is named like a checkpoint, also without a manifest, so that it can be reported."""
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if NAME.fullmatch(entry.name) and not entry.is_symlink()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise disk_error(error, "cannot read the checkpoints", root) from error
    return [Checkpoint.at(root / name) for name in names]
