"""The checkpoints of a store, by their manifests; which of them stay, by the policy of the run directory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairlead.errors import CheckpointError
from fairlead_runs.commit.checkpoints import NAME, Newest, Rated
from fairlead_runs.commit.hashing import FileHash, new_hasher
from fairlead_runs.commit.manifest import MANIFEST, Damage, Manifest, is_inside, wrong_checksum
from fairlead_runs.commit.retention import KEEP, RetentionPolicy, chosen
from fairlead_runs.remote.store import Entry, Store
from fairlead_runs.remote.urls import join

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
        """What the writer said of it: step, epoch, metrics, ...; nothing when the manifest is damaged."""
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
    """All that is at the place of a run, with one look at the store and one at each manifest."""
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

    Only the one process that writes to this place may call it, and not during an upload of its own; `before_each` as in
    `retain`.
    """
    left = [name for name, entries in _grouped(store.list()).items() if MANIFEST not in entries]
    for name in left:
        before_each()
        store.delete(f"{name}/{inside}" for inside in store.at(name).list())
    return left


def changed(
    store: Store, checkpoint: str, name: str, expected: FileHash, count: Callable[[int], None] | None = None
) -> Damage | None:
    """What is wrong with the content of one file, by reading all of it; `count` is told of each piece's bytes."""
    hasher, size = new_hasher(expected.algorithm), 0
    for chunk in store.chunks(f"{checkpoint}/{name}"):
        hasher.update(chunk)
        size += len(chunk)
        if count is not None:
            count(len(chunk))
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
