"""The checkpoints of a store, by their manifests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairlead.errors import CheckpointError
from fairlead_runs.commit.checkpoints import NAME, Newest
from fairlead_runs.commit.hashing import FileHash, new_hasher
from fairlead_runs.commit.manifest import MANIFEST, Damage, Manifest, is_inside, wrong_checksum
from fairlead_runs.commit.retention import KEEP
from fairlead_runs.remote.retrying import store_error
from fairlead_runs.remote.store import Entry, Store
from fairlead_runs.remote.urls import join

_THREADS = 8


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A checkpoint on a store: it has a manifest.

    Attributes:
        url: Where it is.
        step: The training step in its name.
        version: 1, or n for the n-th checkpoint of one step.
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
        """What the writer said of it: step, epoch, metrics, ...; nothing when the manifest is damaged."""
        return self.manifest.metadata if self.manifest is not None else {}

    @property
    def created(self) -> str:
        """When it was written, UTC, ISO 8601; empty when the manifest is damaged."""
        return self.manifest.created if self.manifest is not None else ""

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts by age, as that of a local one."""
        start = self.metadata.get("start", 0)
        return (start if isinstance(start, int) else 0, self.step, self.version)

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
        place = Path(self.name)
        if self.manifest is None:
            return [Damage(place, MANIFEST, self.problem or "it cannot be read")]
        found = []
        for name, expected in self.manifest.files.items():
            there = self.entries.get(name)
            if not is_inside(name):
                found.append(Damage(place, name, "its name leads out of the checkpoint"))
            elif there is None:
                found.append(Damage(place, name, "missing"))
            elif there.size != expected.size:
                found.append(Damage(place, name, f"{there.size} bytes, should be {expected.size}"))
        return found

    def same_as(self, manifest: Manifest) -> bool:
        """Whether this is a copy of the checkpoint with that manifest."""
        mine = self.manifest
        return mine is not None and mine.files == manifest.files and mine.metadata == manifest.metadata


@dataclass(frozen=True)
class RemoteRun:
    """What is at the place of a run.

    Attributes:
        checkpoints: Those that have a manifest, by step.
        unfinished: Names of those that have none: they are being uploaded, or a killed start has left them.
        others: The first part of all other names: `latest`, `job.yaml`; at another place those of runs.
    """

    checkpoints: list[RemoteCheckpoint]
    unfinished: list[str]
    others: list[str]


def list_run(store: Store) -> RemoteRun:
    """All that is at the place of a run, with one look at the store and one at each manifest.

    Raises:
        CheckpointError: The store refuses, or does not answer.

    Example:
        >>> list_run(Store.open("s3://bucket/prefix/gpt")).unfinished                # doctest: +SKIP
        ['step-00000400']
    """
    entries = store.list()
    groups = grouped(entries)
    unfinished = [name for name, inside in groups.items() if MANIFEST not in inside]
    others = dict.fromkeys(name.partition("/")[0] for name in entries)
    return RemoteRun(_of(store, groups), unfinished, [name for name in others if name not in groups])


def list_checkpoints(store: Store) -> list[RemoteCheckpoint]:
    """The checkpoints of a run by step; those with a damaged manifest too. What has no manifest is none.

    Raises:
        CheckpointError: The store refuses, or does not answer.
    """
    return _of(store, grouped(store.list()))


def checkpoint_at(store: Store, name: str) -> RemoteCheckpoint:
    """One checkpoint by its name.

    Raises:
        CheckpointError: There is none; what is there is named.
    """
    groups = grouped(store.list())
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
    """The newest checkpoint that is complete by manifest and sizes, and what had to be passed over.

    Raises:
        CheckpointError: The store refuses, or does not answer.

    Example:
        >>> newest = newest_complete(Store.open("s3://bucket/prefix/gpt"))           # doctest: +SKIP
    """
    return Newest.of(list_checkpoints(store), RemoteCheckpoint.damages)


def verify(store: Store, checkpoint: RemoteCheckpoint, *, deep: bool = False, threads: int = _THREADS) -> list[Damage]:
    """What is wrong with a checkpoint; an empty list when nothing is.

    Args:
        store: The run's.
        checkpoint: One of it.
        deep: Also read every file and compare its checksum; this transfers all of it.
        threads: Files read at a time.

    Raises:
        CheckpointError: The store refuses, or does not answer.
    """
    damages = checkpoint.damages()
    if damages or not deep or checkpoint.manifest is None:
        return damages
    with ThreadPoolExecutor(threads) as pool:
        files = checkpoint.manifest.files.items()
        return [d for d in pool.map(lambda item: changed(store, checkpoint.name, *item), files) if d is not None]


def changed(
    store: Store, checkpoint: str, name: str, expected: FileHash, count: Callable[[int], None] | None = None
) -> Damage | None:
    """What is wrong with the content of one file, by reading all of it.

    Args:
        store: The run's.
        checkpoint: The checkpoint's name.
        name: The file's name in it.
        expected: What the manifest says.
        count: Is told how many bytes were read, each time.

    Raises:
        CheckpointError: The store refuses, does not answer, or there is no such object.
    """
    found = stored_hash(store, f"{checkpoint}/{name}", expected.algorithm, count)
    if found == expected:
        return None
    return Damage(Path(checkpoint), name, wrong_checksum(expected))


def stored_hash(store: Store, name: str, algorithm: str, count: Callable[[int], None] | None = None) -> FileHash:
    """The checksum of an object, by reading all of it; `count` is told of each piece.

    Raises:
        CheckpointError: The store refuses, does not answer, or there is no such object.
    """

    def read() -> FileHash:
        hasher, size = new_hasher(algorithm), 0
        for chunk in store.chunks(name):
            hasher.update(chunk)
            size += len(chunk)
            if count is not None:
                count(len(chunk))
        return FileHash(algorithm, hasher.hexdigest(), size)

    url = join(store.url, name)
    try:
        return store.retries("read an object", url, read)
    except FileNotFoundError as error:
        raise store_error(error, "read an object", url) from error


def grouped(entries: Mapping[str, Entry]) -> dict[str, dict[str, Entry]]:
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
