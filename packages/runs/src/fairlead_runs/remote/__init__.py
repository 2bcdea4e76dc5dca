"""Checkpoints on an object store, over fsspec URLs: `s3://`, `gs://`, `memory://`, `file://`, ...

Below `<url>/<run>/` everything is named as in the run directory's `checkpoints/`. A store has no rename, so the
`manifest.json` of a checkpoint is uploaded last and is the commit: what has no manifest is no checkpoint. A store that
refuses or does not answer is a `CheckpointError`. fsspec is imported when a store is opened; torch never is.

Example:
    >>> from pathlib import Path
    >>> from fairlead_runs.remote import Store, download, list_checkpoints, newest_complete, upload, verify
    >>> store = Store.open("s3://bucket/prefix/gpt")                               # doctest: +SKIP
    >>> for checkpoint in list_checkpoints(store):                                 # doctest: +SKIP
    ...     print(checkpoint.url, checkpoint.manifest.size, verify(store, checkpoint))
    >>> upload(Path("runs/gpt/checkpoints/step-00000200"), store)                  # doctest: +SKIP
    >>> download(store, newest_complete(store).checkpoint, Path("elsewhere"))      # doctest: +SKIP
"""

from __future__ import annotations

from fairlead_runs.remote.checkpoints import (
    DamagedCopyError,
    RemoteCheckpoint,
    RemoteRun,
    checkpoint_at,
    discard_incomplete,
    download,
    fetch,
    list_checkpoints,
    list_run,
    newest_complete,
    retain,
    upload,
    verify,
)
from fairlead_runs.remote.store import Entry, Store, check_url, is_url, split_checkpoint_url

__all__ = [
    "DamagedCopyError",
    "Entry",
    "RemoteCheckpoint",
    "RemoteRun",
    "Store",
    "check_url",
    "checkpoint_at",
    "discard_incomplete",
    "download",
    "fetch",
    "is_url",
    "list_checkpoints",
    "list_run",
    "newest_complete",
    "retain",
    "split_checkpoint_url",
    "upload",
    "verify",
]
