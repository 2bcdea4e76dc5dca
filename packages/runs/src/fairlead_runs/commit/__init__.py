"""Checkpoints that are never lost: stage, fsync, manifest, publish; verify, newest complete, retention; locks.

The protocol, whatever writes the files (torch, an engine, N ranks in parallel):

1. `stage` makes a hidden directory; each writer writes and fsyncs its own files in it (`write_file`).
2. `publish`, in one process after all writers: manifest, fsync, rename, fsync of the parent, `latest`.
3. `retain`, only after that, deletes what the policy does not keep.

Whenever a process dies or the power fails, `newest_complete` finds a complete checkpoint: the new one or the
one before.  What the disk refuses is a `CheckpointError` that says what to do.  Torch-free, for any training loop.

Example:
    >>> from fairlead_runs.commit import RetentionPolicy, checkpoint_name, publish, retain, stage, write_file
    >>> staged = stage(root, checkpoint_name(200), token="s1")                      # doctest: +SKIP
    >>> digest = write_file(staged / "state.ckpt", lambda file: torch.save(state, file))   # doctest: +SKIP
    >>> publish(staged, {"step": 200, "start": 1}, hashes={"state.ckpt": digest})   # doctest: +SKIP
    >>> retain(root, RetentionPolicy(last=2))                                       # doctest: +SKIP
"""

from __future__ import annotations

from fairlead_runs.commit.checkpoints import (
    Checkpoint,
    Newest,
    checkpoint_name,
    discard_incomplete,
    list_checkpoints,
    newest_complete,
    read_latest,
)
from fairlead_runs.commit.fence import Fence, LockOwner
from fairlead_runs.commit.files import (
    FileHash,
    FileWriter,
    Syscalls,
    atomic_write,
    default_algorithm,
    hash_file,
    write_file,
)
from fairlead_runs.commit.lock import Lock, LockState, read_lock
from fairlead_runs.commit.manifest import Damage, Manifest, read_manifest, verify
from fairlead_runs.commit.publish import abandon, publish, stage
from fairlead_runs.commit.retention import (
    RetentionPolicy,
    best,
    best_or_last,
    best_or_newest,
    is_kept_forever,
    keep_forever,
    named_checkpoint,
    retain,
)

__all__ = [
    "Checkpoint",
    "Damage",
    "Fence",
    "FileHash",
    "FileWriter",
    "Lock",
    "LockOwner",
    "LockState",
    "Manifest",
    "Newest",
    "RetentionPolicy",
    "Syscalls",
    "abandon",
    "atomic_write",
    "best",
    "best_or_last",
    "best_or_newest",
    "checkpoint_name",
    "default_algorithm",
    "discard_incomplete",
    "hash_file",
    "is_kept_forever",
    "keep_forever",
    "list_checkpoints",
    "named_checkpoint",
    "newest_complete",
    "publish",
    "read_latest",
    "read_lock",
    "read_manifest",
    "retain",
    "stage",
    "verify",
    "write_file",
]
