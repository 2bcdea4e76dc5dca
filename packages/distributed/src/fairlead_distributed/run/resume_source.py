"""Which checkpoint a start begins from, or an evaluation loads; before it, its checksums."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fairlead.config_bases import CheckpointIOConfigBase
from fairlead.errors import CheckpointError, FairleadError
from fairlead_distributed.objects import broadcast_object, gather_objects
from fairlead_distributed.run.session import STATE_FILE
from fairlead_runs.commit import Checkpoint, Damage, FileHash, Syscalls, newest_complete, read_manifest, verify
from fairlead_runs.commit.files import remove_tree
from fairlead_runs.commit.manifest import MANIFEST
from fairlead_runs.remote import fetch

Check = Callable[[Path], list[Damage]]
"""Says what is wrong with a checkpoint's directory."""

_Found = tuple[list[Damage], FairleadError | None]


def check_for(*, deep: bool) -> Check:
    """How rank 0 looks at a checkpoint; when it compares checksums and there are others, they `help_to_compare`."""
    if deep and dist.is_initialized() and dist.get_world_size() > 1:
        return _together
    return partial(verify, deep=deep)


def help_to_compare(path: Path) -> None:
    """What the other ranks do for each path that rank 0 has `shared`."""
    gather_objects(_part(path))


def _together(path: Path) -> list[Damage]:
    if damages := verify(path):  # sizes are compared here: that is quick
        return damages
    found: list[_Found] = gather_objects(_part(broadcast_object(path)))
    for _, error in found:
        if error is not None:
            raise error
    files, confirmed = read_manifest(path).files, found[0][0]
    for rank, (damages, _) in enumerate(found):
        if rank and damages:  # another node's view of a file system may be stale; that must not cost a checkpoint
            mine = verify(path, deep=True, only=_files_of(files, rank, len(found)))
            confirmed += mine
            if not mine:
                warnings.warn(
                    f"rank {rank} reads another content than rank 0, where it is right: {damages[0]}", stacklevel=2
                )
    return confirmed


def _part(path: Path) -> _Found:
    try:
        files = read_manifest(path).files
    except CheckpointError as error:
        return [Damage(path, MANIFEST, error.why or error.what)], None
    try:
        return verify(path, deep=True, only=_files_of(files, dist.get_rank(), dist.get_world_size())), None
    except FairleadError as error:  # a checksum that this rank does not know
        return [], error


def _files_of(files: Mapping[str, FileHash], rank: int, ranks: int) -> set[str]:
    """The files that a rank reads: the largest are dealt out first."""
    by_size = sorted(files, key=lambda name: (-files[name].size, name))
    return set(by_size[rank::ranks])


_DOWNLOADS = ".downloads"


@dataclass(frozen=True)
class ResumeSource:
    """What a start begins from: the file, the checkpoint of ours that it is in, and the messages for the user."""

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

    A checkpoint of the run in which `check` finds damage is passed over; one that was requested is an error.
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
    skipped = tuple(f"warning: {damage}; this checkpoint is skipped" for damage in newest.skipped)
    if newest.checkpoint is not None:
        file = newest.checkpoint.path / STATE_FILE
        return ResumeSource(file, newest.checkpoint, (*skipped, f"resumes from {newest.checkpoint.path}"))
    if fallback is not None:
        return ResumeSource(state_file(Path(fallback)), None, (*skipped, f"starts from {fallback}"))
    if skipped:
        skipped = (*skipped, "warning: no undamaged checkpoint is left: the run starts from the beginning")
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
