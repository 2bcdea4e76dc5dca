"""The checkpoints of a store by their manifests: listed, uploaded, downloaded, and deleted by the policy of the run."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fairlead.errors import CheckpointError
from fairlead_runs.commit.checkpoints import LATEST, NAME, Checkpoint, Newest, Rated
from fairlead_runs.commit.files import FileHash, Syscalls, disk_error, ensure_dir, hash_file, new_hasher
from fairlead_runs.commit.manifest import MANIFEST, Damage, Manifest, is_inside, read_manifest, wrong_checksum
from fairlead_runs.commit.publish import abandon, publish, stage
from fairlead_runs.commit.retention import KEEP, RetentionPolicy, chosen, is_kept_forever
from fairlead_runs.remote.store import MIB, Entry, Store, join, split_checkpoint_url

_THREADS = 8


@dataclass(frozen=True)
class RemoteCheckpoint(Rated):
    """A checkpoint on a store: it has a manifest.

    Attributes:
        url: Where it is.
        manifest: Its manifest; None when that is damaged.
        problem: What is wrong with the manifest.
        entries: Its objects, by their names inside the checkpoint.
    """

    url: str
    step: int
    version: int
    manifest: Manifest | None
    problem: str | None = None
    entries: Mapping[str, Entry] = field(default_factory=dict, repr=False, compare=False, hash=False)

    def __hash__(self) -> int:
        return hash(self.url)

    @property
    def name(self) -> str:
        """Its name, `step-00000200`."""
        return self.url.rpartition("/")[2]

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The writer's metadata: step, epoch, metrics, ...; empty when the manifest is damaged."""
        return self.manifest.metadata if self.manifest is not None else {}

    @property
    def created(self) -> str:
        """When it was written, UTC, ISO 8601; empty when the manifest is damaged."""
        return self.manifest.created if self.manifest is not None else ""

    @property
    def complete(self) -> bool:
        """Whether the manifest is sound and every file is there in its size; contents are not read."""
        return not self.damages()

    @property
    def kept_forever(self) -> bool:
        """Whether no retention deletes it: it has an object `KEEP`, or `keep: true` in its metadata."""
        return KEEP in self.entries or self.metadata.get("keep") is True

    def damages(self) -> list[Damage]:
        """What the listing shows to be wrong."""
        path = Path(self.name)
        if self.manifest is None:
            return [Damage(path, MANIFEST, self.problem or "it cannot be read")]
        found = []
        for name, expected in self.manifest.files.items():
            there = self.entries.get(name)
            if not is_inside(name):
                found.append(Damage(path, name, "its name leads out of the checkpoint"))
            elif there is None:
                found.append(Damage(path, name, "missing"))
            elif there.size != expected.size:
                found.append(Damage(path, name, f"{there.size} bytes, should be {expected.size}"))
        return found

    def same_as(self, manifest: Manifest) -> bool:
        """Whether this is a copy of the checkpoint with that manifest."""
        mine = self.manifest
        return mine is not None and mine.files == manifest.files and mine.metadata == manifest.metadata


@dataclass(frozen=True)
class RemoteRun:
    """What is below the URL of a run.

    Attributes:
        checkpoints: Those that have a manifest, by step.
        unfinished: Names of those that have none: they are being uploaded, or a killed start has left them.
        others: The first part of all other names: `latest`, `job.yaml`; below another URL those of runs.
    """

    checkpoints: list[RemoteCheckpoint]
    unfinished: list[str]
    others: list[str]


def list_run(store: Store) -> RemoteRun:
    """All that is below the URL of a run, with one look at the store and one at each manifest."""
    entries = store.list()
    groups = _grouped(entries)
    unfinished = [name for name, inside in groups.items() if MANIFEST not in inside]
    others = dict.fromkeys(name.partition("/")[0] for name in entries)
    return RemoteRun(_of(store, groups), unfinished, [name for name in others if name not in groups])


def list_checkpoints(store: Store) -> list[RemoteCheckpoint]:
    """The checkpoints of a run by step; those with a damaged manifest too. What has no manifest is none."""
    return _of(store, _grouped(store.list()))


def checkpoint_at(store: Store, name: str) -> RemoteCheckpoint:
    """One checkpoint by its name; `CheckpointError` says what is there instead."""
    groups = _grouped(store.list())
    found = _of(store, {name: groups[name]} if name in groups else {})
    if found:
        return found[0]
    complete = [other for other, entries in groups.items() if MANIFEST in entries]
    if name in groups:
        why = "it has no manifest: it was not uploaded to its end"
    else:
        why = f"there are: {', '.join(complete[-8:])}" if complete else "there is no checkpoint at all"
    raise CheckpointError("there is no such checkpoint", where=join(store.url, name), why=why, fix="name one that is")


def newest_complete(store: Store) -> Newest[RemoteCheckpoint]:
    """The newest checkpoint that is complete by manifest and sizes, and what had to be passed over."""
    return Newest.of(list_checkpoints(store), RemoteCheckpoint.damages)


def verify(store: Store, checkpoint: RemoteCheckpoint, *, deep: bool = False, threads: int = _THREADS) -> list[Damage]:
    """What is wrong with a checkpoint; an empty list when nothing is.

    With `deep`, every file is read and its checksum compared, `threads` at a time; this transfers all of it.
    """
    damages = checkpoint.damages()
    if damages or not deep or checkpoint.manifest is None:
        return damages
    with ThreadPoolExecutor(threads) as pool:
        files = checkpoint.manifest.files.items()
        return [d for d in pool.map(lambda item: changed(store, checkpoint.name, *item), files) if d is not None]


def retain(
    store: Store,
    policy: RetentionPolicy,
    *,
    keep: Collection[str] = (),
    before_each: Callable[[], None] = lambda: None,
) -> list[RemoteCheckpoint]:
    """Deletes what the policy does not keep, and returns it, oldest first; call it after `upload` has returned.

    The manifest goes first: what is half deleted is no checkpoint. Never deletes the newest complete one, one with an
    object `KEEP`, a damaged one, or one whose name is in `keep`. `before_each` is called immediately before each is
    deleted; raises to leave it and the others.
    """
    if policy.last is None:
        return []
    ordered = sorted((item for item in list_checkpoints(store) if item.complete), key=lambda item: item.order)
    retained = chosen(ordered, policy)
    deleted = []
    for item in ordered:
        if item in retained or item.kept_forever or item.name in keep:
            continue
        before_each()
        store.delete([f"{item.name}/{MANIFEST}"])
        store.delete(f"{item.name}/{inside}" for inside in item.entries if inside != MANIFEST)
        deleted.append(item)
    return deleted


def discard_incomplete(store: Store, *, before_each: Callable[[], None] = lambda: None) -> list[str]:
    """Deletes objects below a checkpoint's name without a manifest, left by killed uploads and deletions; their names.

    Only the one process that writes to this URL may call it, and not during an upload of its own; `before_each` as in
    `retain`.
    """
    left = [name for name, entries in _grouped(store.list()).items() if MANIFEST not in entries]
    for name in left:
        before_each()
        store.delete(f"{name}/{inside}" for inside in store.at(name).list())
    return left


def changed(store: Store, checkpoint: str, name: str, expected: FileHash) -> Damage | None:
    """What is wrong with the content of one file, by reading all of it."""
    hasher, size = new_hasher(expected.algorithm), 0
    for chunk in store.chunks(f"{checkpoint}/{name}"):
        hasher.update(chunk)
        size += len(chunk)
    if FileHash(expected.algorithm, hasher.hexdigest(), size) == expected:
        return None
    return Damage(Path(checkpoint), name, wrong_checksum(expected))


def _grouped(entries: Mapping[str, Entry]) -> dict[str, dict[str, Entry]]:
    """The objects below names like a checkpoint's, by that name and the name inside."""
    groups: dict[str, dict[str, Entry]] = {}
    for name, entry in entries.items():
        folder, _, inside = name.partition("/")
        if inside and NAME.fullmatch(folder):
            groups.setdefault(folder, {})[inside] = entry
    return groups


def _of(store: Store, groups: Mapping[str, Mapping[str, Entry]]) -> list[RemoteCheckpoint]:
    named = [(name, entries) for name, entries in groups.items() if MANIFEST in entries]
    if not named:
        return []
    with ThreadPoolExecutor(min(_THREADS, len(named))) as pool:
        texts = list(pool.map(lambda item: store.read(f"{item[0]}/{MANIFEST}"), named))
    found = []
    for (name, entries), text in zip(named, texts, strict=True):
        match = NAME.fullmatch(name)
        if text is None or match is None:  # retention deleted it while we were looking
            continue
        manifest, problem = None, None
        try:
            manifest = Manifest.load(text)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = str(error) or "the manifest is damaged"
        url = join(store.url, name)
        found.append(RemoteCheckpoint(url, int(match[1]), int(match[2] or 1), manifest, problem, entries))
    return sorted(found, key=lambda item: (item.step, item.version))


_PARTS = 10_000  # that an object of S3 may have


def upload(
    path: Path,
    store: Store,
    *,
    threads: int = 4,
    before_commit: Callable[[], None] | None = None,
) -> RemoteCheckpoint:
    """Copies a published checkpoint; when this returns, the copy is complete, and `latest` names it.

    What an earlier attempt has uploaded, right by the store's own checksum, is not re-uploaded. A checkpoint that is
    there already stays; another one of that name is never overwritten: this one then becomes `step-00000200.2`. Each
    object is compared by the store's checksum (MD5, or S3's of the parts); where that cannot be compared, as with
    encryption by KMS, it is read back.

    Args:
        path: The checkpoint's directory.
        store: The run's store.
        threads: Files uploaded at a time.
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
    _send_files(path, store, name, manifest.files, threads)
    if is_kept_forever(local):
        store.write(f"{name}/{KEEP}", b"This checkpoint is kept until this object is deleted.\n")
    if before_commit is not None:
        before_commit()
    store.write(f"{name}/{MANIFEST}", manifest.dump())
    copy = checkpoint_at(store, name)
    if not (copy.same_as(manifest) and copy.complete):
        store.delete([f"{name}/{MANIFEST}"])
        raise _not_as_sent(join(store.url, name, MANIFEST))
    store.write(LATEST, f"{name}\n".encode())
    return copy


def _send_files(path: Path, store: Store, checkpoint: str, files: Mapping[str, FileHash], threads: int) -> None:
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
        return sent and (entry.checksum is None or changed(store, checkpoint, name, expected) is None)

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
    """A file's checksum, and what a store would call it: its MD5, of all or of its parts."""
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
    """The name, or one behind all that are there of the same step: the highest version is the newest."""
    if name not in taken:
        return name
    stem = name.partition(".")[0]
    versions = [int(other.partition(".")[2] or 1) for other in taken if other.partition(".")[0] == stem]
    return f"{stem}.{max(versions) + 1}"


def _not_as_sent(url: str) -> CheckpointError:
    return CheckpointError(
        "an object on the store is not what was sent",
        where=url,
        why="its size or checksum is another, twice",
        fix="another program may write there: give each run its own prefix",
    )


_TOKEN = "download"


class DamagedCopyError(CheckpointError):
    """A checkpoint on a store is not what its manifest says; nothing of it remains here."""


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
    run_url, name = split_checkpoint_url(url)
    store = store if store is not None and store.url == run_url else Store.open(run_url)
    return download(store, checkpoint_at(store, name), root)


def _fetch_files(
    store: Store, checkpoint: str, staged: Path, files: Mapping[str, FileHash], threads: int
) -> list[Damage]:
    """What is wrong with a file after a second fetch: a connection may end too early without an error."""

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
