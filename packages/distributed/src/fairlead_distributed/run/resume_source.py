"""Which checkpoint a start begins from, or an evaluation loads."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairlead.config_bases import CheckpointIOConfigBase
from fairlead.errors import CheckpointError
from fairlead_distributed.run.checksums import Check
from fairlead_distributed.run.session import STATE_FILE
from fairlead_runs.commit import Checkpoint, Syscalls, newest_complete, verify
from fairlead_runs.commit.files import remove_tree
from fairlead_runs.remote import fetch

_DOWNLOADS = ".downloads"


@dataclass(frozen=True)
class ResumeSource:
    """What a start begins from: the file, the checkpoint of ours that it is in, and what the user should be told."""

    file: Path | None = None
    own: Checkpoint | None = None
    messages: tuple[str, ...] = ()

    def own_metadata(self) -> Mapping[str, Any] | None:
        """The metadata of a checkpoint of Fairlead's; a plain one has none."""
        return self.own.metadata if self.own is not None else None


def find_resume_source(
    checkpoints: Path, load: Path | None, fallback: str | os.PathLike[str] | None, *, check: Check = verify
) -> ResumeSource:
    """`--resume PATH`, else the run's own newest complete checkpoint, else `ckpt_path`, else nothing.

    A checkpoint of its own in which `check` finds damage is passed over; one that was asked for is an error.
    """
    if load is not None:
        own = committed(load)
        if own is not None and (damages := check(own.path)):
            raise CheckpointError(
                "the checkpoint is damaged",
                where=str(own.path),
                why="\n".join(map(str, damages)),
                fix="name another one; `fairlead checkpoint ls` shows what there is",
            )
        return ResumeSource(state_file(load), own, (f"starts from {load}",))
    newest = newest_complete(checkpoints, check=check)
    skipped = tuple(f"warning: {damage}; it is skipped, the one before it is used" for damage in newest.skipped)
    if newest.checkpoint is not None:
        file = newest.checkpoint.path / STATE_FILE
        return ResumeSource(file, newest.checkpoint, (*skipped, f"resumes from {newest.checkpoint.path}"))
    if fallback is not None:
        return ResumeSource(state_file(Path(fallback)), None, (*skipped, f"starts from {fallback}"))
    return ResumeSource(messages=skipped)


def downloaded(url: str, run: Path) -> Path:
    """A checkpoint that is not this run's own, beside the run directory until the next start needs another one."""
    folder = run.parent / _DOWNLOADS / run.name
    remove_tree(folder, Syscalls())
    return fetch(url, folder).path


def downloaded_for_now(url: str) -> Path:
    """A checkpoint that is deleted when this process ends."""
    folder = tempfile.mkdtemp(prefix="fairlead-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return fetch(url, Path(folder)).path


def compares(config: CheckpointIOConfigBase) -> bool:
    """Whether a backend compares checksums when it loads, or the one that it wraps does."""
    inner = getattr(config, "inner", None)
    return compares(inner) if isinstance(inner, CheckpointIOConfigBase) else bool(getattr(config, "verify", True))


def state_file(path: Path) -> Path:
    """The file to load: a plain checkpoint, or the state of one of ours."""
    if (path / STATE_FILE).exists():
        return (path / STATE_FILE).absolute()
    if not path.exists():
        raise CheckpointError(
            "the checkpoint does not exist",
            where=str(path),
            fix="name a run directory, a folder under its checkpoints/, or a .ckpt file",
        )
    return path.absolute()


def committed(path: Path) -> Checkpoint | None:
    """The checkpoint of Fairlead's that a path or its state file names; None: it is a plain one."""
    # The state is a file, or a directory of shards.
    folder = path if path.is_dir() and path.name != STATE_FILE else path.parent
    return Checkpoint.at(folder) if (folder / "manifest.json").exists() else None
