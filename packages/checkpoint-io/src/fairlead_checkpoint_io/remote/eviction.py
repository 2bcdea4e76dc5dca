"""Which local checkpoints may be deleted, because the store has them, and when."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from fairlead_runs.commit import RetentionPolicy, Syscalls, best, is_kept_forever
from fairlead_runs.commit.checkpoints import readable_checkpoints, to_trash
from fairlead_runs.commit.files import disk_error, remove_tree


def evict(root: Path, limit: int, uploaded: Collection[str], policy: RetentionPolicy | None) -> tuple[int, list[str]]:
    """Deletes local copies that the store has, the oldest first, until one more checkpoint has room.

    Args:
        root: The `checkpoints` directory.
        limit: Bytes that all of them may take.
        uploaded: Names of those that are complete on the store.
        policy: Says which is the best one; it stays, and so do the newest and those that are marked.

    Returns:
        Bytes that are lacking for one more of the newest one's size, and the names of those that could still go once
        they are uploaded.

    Raises:
        CheckpointError: Something cannot be deleted.
    """
    there = readable_checkpoints(root)
    stay = {there[-1].name} if there else set()
    if policy is not None and policy.metric is not None:
        stay.update(item.name for item in best(there, policy.metric, policy.mode)[:1])
    size = {item.name: item.manifest.size for item in there}
    missing = sum(size.values()) + (size[there[-1].name] if there else 0) - limit
    movable = [item for item in there if item.name not in stay and not is_kept_forever(item)]
    system = Syscalls()
    for item in movable:
        if missing <= 0:
            break
        if item.name in uploaded:
            try:
                remove_tree(to_trash(item.path, system), system)
            except OSError as error:
                raise disk_error(error, "cannot delete a local copy", item.path) from error
            missing -= size[item.name]
    return max(0, missing), [item.name for item in movable if item.name not in uploaded]
