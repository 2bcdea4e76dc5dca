"""The checksums of a checkpoint before a start resumes from it: each rank reads a part of the files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch.distributed as dist

from fairlead.errors import CheckpointError, FairleadError
from fairlead_distributed.objects import broadcast_object, gather_objects
from fairlead_runs.commit import Damage, FileHash, read_manifest, verify
from fairlead_runs.commit.manifest import MANIFEST

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
