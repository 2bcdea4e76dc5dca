"""Which checkpoints stay on a store: the policy of the run directory, and never the newest complete one deleted."""

from __future__ import annotations

from collections.abc import Collection

from fairlead_runs.commit.manifest import MANIFEST
from fairlead_runs.commit.retention import RetentionPolicy, chosen
from fairlead_runs.remote.listing import RemoteCheckpoint, grouped, list_checkpoints
from fairlead_runs.remote.store import Store


def retain(store: Store, policy: RetentionPolicy, *, keep: Collection[str] = ()) -> list[RemoteCheckpoint]:
    """Deletes what the policy does not keep, each time the manifest first: what is half deleted is no checkpoint.

    Call it after `upload` has returned. Never deletes the newest complete one, one with an object `KEEP`, or a
    damaged one.

    Args:
        store: The run's.
        policy: That of the run directory.
        keep: Names that stay in any case.

    Returns:
        What was deleted, oldest first.

    Raises:
        CheckpointError: The store refuses, or does not answer.
    """
    if policy.last is None:
        return []
    ordered = sorted((item for item in list_checkpoints(store) if item.complete), key=lambda item: item.order)
    kept = chosen(ordered, policy)
    deleted = []
    for item in ordered:
        if item in kept or item.kept_forever or item.name in keep:
            continue
        store.delete([f"{item.name}/{MANIFEST}"])
        store.delete(f"{item.name}/{inside}" for inside in item.entries if inside != MANIFEST)
        deleted.append(item)
    return deleted


def discard_incomplete(store: Store) -> list[str]:
    """Deletes what killed uploads and deletions have left: objects below a checkpoint's name without a manifest.

    Only the one process that writes to this place may call it, and not during an upload of its own.

    Args:
        store: The run's.

    Returns:
        The names, in order.

    Raises:
        CheckpointError: The store refuses, or does not answer.
    """
    left = [name for name, entries in grouped(store.list()).items() if MANIFEST not in entries]
    for name in left:
        store.delete(f"{name}/{inside}" for inside in store.at(name).list())
    return left
