"""From a store into a directory of checkpoints, through the same protocol as a save."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fairlead.errors import CheckpointError
from fairlead_runs.commit.checkpoints import Checkpoint
from fairlead_runs.commit.files import disk_error, ensure_dir
from fairlead_runs.commit.hashing import FileHash, hash_file
from fairlead_runs.commit.manifest import Damage, wrong_checksum
from fairlead_runs.commit.publish import abandon, publish, stage
from fairlead_runs.commit.syscalls import Syscalls
from fairlead_runs.remote.listing import RemoteCheckpoint, checkpoint_at, list_checkpoints
from fairlead_runs.remote.store import Store
from fairlead_runs.remote.urls import split_checkpoint_url

_TOKEN = "download"


class DamagedCopyError(CheckpointError):
    """A checkpoint on a store is not what its manifest says; nothing of it was kept."""


def download(store: Store, checkpoint: RemoteCheckpoint, root: Path, *, threads: int = 8) -> Checkpoint:
    """Copies a checkpoint into a directory of checkpoints, where it appears once all of it is there and right.

    Args:
        root: The `checkpoints` directory; made when missing.
        threads: Files downloaded at a time.

    Returns:
        The local checkpoint; `step-00000200.2` where there is a complete one of that name already.

    Raises:
        DamagedCopyError: A file is missing or is not what the manifest says.
    """
    damages = checkpoint.damages()
    if damages or checkpoint.manifest is None:
        raise _damaged(checkpoint, damages)
    staged = stage(root, checkpoint.name.partition(".")[0], token=_TOKEN)
    with contextlib.ExitStack() as undo:
        undo.callback(abandon, staged)
        damages = _fetch_files(store, checkpoint.name, staged, checkpoint.manifest.files, threads)
        if damages:
            raise _damaged(checkpoint, damages)
        published = publish(staged, checkpoint.manifest.metadata, hashes=checkpoint.manifest.files)
        undo.pop_all()
    return published


def newest_sound(
    store: Store, root: Path, *, after: tuple[int, int, int] | None
) -> tuple[Checkpoint | None, list[str]]:
    """Downloads the newest sound checkpoint of a run that is newer than `after`, the `order` of the newest local one.

    The local copy, or None where the store has nothing newer; and what was passed over, in words.
    """
    skipped: list[str] = []
    for checkpoint in sorted(list_checkpoints(store), key=lambda item: item.order, reverse=True):
        if checkpoint.manifest is not None and after is not None and checkpoint.order <= after:
            break
        try:
            return download(store, checkpoint, root), skipped
        except DamagedCopyError as error:
            skipped.append(f"{checkpoint.url}: {error.why}")
    return None, skipped


def fetch(url: str, root: Path, *, store: Store | None = None) -> Checkpoint:
    """Downloads the checkpoint of a URL, `s3://bucket/prefix/RUN/step-00000200`, into a directory of checkpoints.

    `store` is the run's, where it is open already; None: opened without options.

    Raises:
        ConfigError: This is not the URL of a checkpoint.
        CheckpointError: There is none, or it is damaged.
    """
    place, name = split_checkpoint_url(url)
    store = store if store is not None and store.url == place else Store.open(place)
    return download(store, checkpoint_at(store, name), root)


def _fetch_files(
    store: Store, checkpoint: str, staged: Path, files: Mapping[str, FileHash], threads: int
) -> list[Damage]:
    """What is wrong with a file also when it is fetched again: a connection may end too early without an error."""

    def is_wrong(name: str) -> bool:
        return hash_file(staged / name, files[name].algorithm, sync=True) != files[name]

    wrong = list(files)
    try:
        for name in files:
            ensure_dir((staged / name).parent, Syscalls())
        for _ in range(2):
            store.get({f"{checkpoint}/{name}": staged / name for name in wrong}, at_a_time=threads)
            with ThreadPoolExecutor(threads) as pool:
                wrong = [name for name, bad in zip(wrong, pool.map(is_wrong, wrong), strict=True) if bad]
            if not wrong:
                break
    except OSError as error:
        raise disk_error(error, "cannot write a downloaded checkpoint", staged) from error
    return [Damage(Path(checkpoint), name, wrong_checksum(files[name])) for name in wrong]


def _damaged(checkpoint: RemoteCheckpoint, damages: list[Damage]) -> DamagedCopyError:
    more = f", and {len(damages) - 1} more" if len(damages) > 1 else ""
    return DamagedCopyError(
        "a checkpoint on the store is damaged",
        where=checkpoint.url,
        why=f"{damages[0].file or checkpoint.name}: {damages[0].problem}{more}",
        fix="use the one before it; `fairlead checkpoint ls` shows what is there",
    )
