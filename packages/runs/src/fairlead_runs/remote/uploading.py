"""Copying a published checkpoint to a store: its files first, each checked, the manifest last."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

from fairlead.errors import CheckpointError
from fairlead_runs.commit.checkpoints import LATEST, Checkpoint
from fairlead_runs.commit.files import disk_error
from fairlead_runs.commit.hashing import FileHash, new_hasher
from fairlead_runs.commit.manifest import MANIFEST, read_manifest
from fairlead_runs.commit.retention import KEEP, is_kept_forever
from fairlead_runs.remote.listing import RemoteCheckpoint, changed, list_checkpoints
from fairlead_runs.remote.store import MIB, Entry, Store
from fairlead_runs.remote.urls import join

Check = Literal["checksum", "size"]
_PARTS = 10_000  # that an object of S3 may have


def upload(
    path: Path,
    store: Store,
    *,
    threads: int = 4,
    check: Check = "checksum",
    before_commit: Callable[[], None] | None = None,
) -> RemoteCheckpoint:
    """Copies a published checkpoint; when this returns, the copy is complete, and `latest` names it.

    What an earlier attempt has uploaded, right by the store's own checksum, is not uploaded again. A checkpoint that is
    there already stays; another one of that name is never overwritten: this one then becomes `step-00000200.2`.

    Args:
        path: The checkpoint's directory.
        store: The run's place.
        threads: Files uploaded at a time.
        check: What is compared after each upload. `checksum`: the store's own (MD5, or S3's of the parts); where it
            gives one that cannot be compared, as with encryption by KMS, the object is read back. `size`: sizes only.
        before_commit: Called before the manifest is written; raises to leave it out.

    Raises:
        CheckpointError: The checkpoint is damaged, the store refuses or does not answer, or an object is not what was
            sent. There is no manifest then.
    """
    manifest, local = read_manifest(path), Checkpoint.at(path)
    there = [item for item in list_checkpoints(store) if item.step == local.step]
    name = path.name
    for item in there:
        if item.same_as(manifest) and item.complete:
            store.write(LATEST, f"{item.name}\n".encode())
            return item
    if any(item.name == name for item in there):
        name = _free_name(path.name, {item.name for item in there if item.complete})
        store.delete([f"{name}/{MANIFEST}"])  # of a damaged one: it must not vouch for what is uploaded now
    _send_files(path, store, name, manifest.files, threads=threads, check=check)
    if is_kept_forever(local):
        store.write(f"{name}/{KEEP}", b"This checkpoint is kept until this object is deleted.\n")
    if before_commit is not None:
        before_commit()
    content = manifest.dump()
    store.write(f"{name}/{MANIFEST}", content)
    if store.read(f"{name}/{MANIFEST}") != content:
        store.delete([f"{name}/{MANIFEST}"])
        raise _not_as_sent(join(store.url, name, MANIFEST))
    store.write(LATEST, f"{name}\n".encode())
    entries = {file: Entry(f"{name}/{file}", expected.size) for file, expected in manifest.files.items()}
    place = Checkpoint.at(Path(name))
    return RemoteCheckpoint(join(store.url, name), place.step, place.version, manifest, None, entries)


def _send_files(
    path: Path, store: Store, checkpoint: str, files: Mapping[str, FileHash], *, threads: int, check: Check
) -> None:
    """Sends the files until the store has each as it is here, at most twice."""

    def summed(item: tuple[str, FileHash]) -> tuple[str, str]:
        name, expected = item
        digest, sums = _read_once(path / name, expected, store.part)
        if digest != expected:
            raise CheckpointError(
                "a checkpoint is damaged and was not uploaded",
                where=str(path / name),
                why=f"its {expected.algorithm} checksum is wrong: the content has changed since it was written",
                fix="check the disk; the copies of earlier checkpoints are not touched",
            )
        return sums

    def is_there(name: str, known: Mapping[str, Entry], *, sent: bool) -> bool:
        entry, expected = known.get(name), files[name]
        if entry is None or entry.size != expected.size:
            return False
        if entry.checksum in sums[name]:
            return True
        # What an earlier attempt has left may be of another content. With encryption by KMS, or other parts than
        # expected, an ETag says nothing of it.
        by_size = check == "size" or entry.checksum is None
        return sent and (by_size or changed(store, checkpoint, name, expected) is None)

    with ThreadPoolExecutor(threads) as pool:
        try:
            sums = dict(zip(files, pool.map(summed, files.items()), strict=True))
            for tries in range(3):
                known = store.at(checkpoint).list()
                there = list(pool.map(partial(is_there, known=known, sent=tries > 0), files))
                lacking = [name for name, is_right in zip(files, there, strict=True) if not is_right]
                if not lacking:
                    return
                if tries == 2:
                    raise _not_as_sent(join(store.url, checkpoint, lacking[0]))
                store.put({f"{checkpoint}/{name}": path / name for name in lacking}, at_a_time=threads)
        except OSError as error:
            raise disk_error(error, "cannot read a checkpoint that is to be uploaded", path) from error


def _read_once(file: Path, expected: FileHash, part: int) -> tuple[FileHash, tuple[str, str]]:
    """A file's checksum, and what a store would call it: its MD5, as a whole or of its parts."""
    size = os.stat(file).st_size
    part = max(part, -(-size // _PARTS))
    ours, of_all, parts = new_hasher(expected.algorithm), hashlib.md5(usedforsecurity=False), []
    buffer = memoryview(bytearray(min(part, 4 * MIB)))
    with file.open("rb", buffering=0) as source:
        of_part, left, total = hashlib.md5(usedforsecurity=False), part, 0
        while count := source.readinto(buffer[: min(len(buffer), left)]):
            for hasher in (ours, of_all, of_part):
                hasher.update(buffer[:count])
            left, total = left - count, total + count
            if left == 0:
                parts.append(of_part.digest())
                of_part, left = hashlib.md5(usedforsecurity=False), part
        if left != part:
            parts.append(of_part.digest())
    of_parts = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
    digest = FileHash(expected.algorithm, ours.hexdigest(), total)
    return digest, (of_all.hexdigest(), f"{of_parts}-{len(parts)}")


def _free_name(name: str, taken: set[str]) -> str:
    stem = name.partition(".")[0]
    names = itertools.chain([name], (f"{stem}.{version}" for version in itertools.count(2)))
    return next(candidate for candidate in names if candidate not in taken)


def _not_as_sent(url: str) -> CheckpointError:
    return CheckpointError(
        "an object on the store is not what was sent",
        where=url,
        why="its size or checksum is another, twice",
        fix="another program may write there: give each run its own prefix",
    )
