"""The thread that keeps a store's copy of a run: what is committed goes there, the newest first."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fairlead.errors import CheckpointError, FairleadError, RunDirectoryError
from fairlead_checkpoint_io.remote import RemoteCheckpointIOConfig
from fairlead_checkpoint_io.remote.run_on_store import RunOnStore, save_records
from fairlead_runs.commit import Checkpoint, Fence, RetentionPolicy, newest_complete, retain
from fairlead_runs.ownership import owns_nothing
from fairlead_runs.remote import Store, discard_incomplete, upload
from fairlead_runs.remote import retain as retain_remote

log = logging.getLogger("fairlead.checkpoint_io")


class Mirror:
    """Copies one run to a store, opened at the run's URL; used by rank 0 only.

    Args:
        config: The backend's.
        store: For the uploads.
        at_start: The same place with fewer tries, while a person may be waiting.
    """

    def __init__(self, config: RemoteCheckpointIOConfig, store: Store, at_start: Store) -> None:
        self._config = config
        self._closing = threading.Event()
        self._store = store
        self.remote = RunOnStore(at_start)
        self._state = threading.Condition()
        self._pending: dict[str, Checkpoint] = {}
        self._failure: FairleadError | None = None  # until the next save, or the end, nothing is tried again
        self._current: str | None = None
        self._policy: RetentionPolicy | None = None
        self._lost: FairleadError | None = None
        self._fence: Fence | None = None
        self._thread: threading.Thread | None = None
        self._record: Callable[..., None] = lambda *_, **__: None
        self._run: Path | None = None

    # -- at a start, in the main thread

    def begin(self, run: Path, start: int, event: Callable[..., None], fence: Fence) -> None:
        """Makes this start the owner of the run on the store, and uploads what an earlier one has left behind."""
        self._run, self._record, self._fence = run, event, fence
        copies = self.remote.claim(run, start)
        here = newest_complete(run / "checkpoints").checkpoint
        if here is not None and not any(copy.same_as(here.manifest) for copy in copies):
            self._add(here)

    # -- during a run

    def committed(self, checkpoint: Checkpoint, policy: RetentionPolicy) -> None:
        """Takes a published checkpoint, and deletes here what the policy does not keep.

        Of these, one that is being uploaded stays, and one that still waits is not uploaded: a newer one is.
        """
        with self._state:  # throughout: no upload begins of what is being deleted
            self._policy = policy
            self._failure = None
            held = {self._current} if self._current is not None else set()
            self._add(checkpoint)
            gone = {item.name for item in retain(checkpoint.path.parent, policy, held=held, fence=self._fence)}
            for name in gone & self._pending.keys():
                del self._pending[name]
                log.info("%s was replaced by a newer checkpoint before it was uploaded", name)

    def wait_uploaded(self, timeout_s: float | None) -> str | None:
        """Waits until everything is uploaded; gives what is not and why, or None.

        After `timeout_s` seconds the uploads are given up; None: once they were tried `retries` times more.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._state:
            self._failure = None
            self._state.notify_all()
            while self._pending and self._failure is None and self._lost is None:
                left = 1.0 if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    break
                self._state.wait(min(left, 1.0))
            reason, names = self._lost or self._failure, sorted(self._pending)
        if self._lost is None and not names:
            self._last_records()
            return None
        if timeout_s is not None:
            self._closing.set()
        why = reason.block() if reason is not None else f"not finished within {timeout_s:g} s"
        return f"{', '.join(names) or 'the last checkpoint'} is not on {self._store.url} yet: {why}"

    def close(self) -> None:
        """Waits for what is being uploaded, at most `stop_wait_s`, and ends the thread."""
        if self._thread is None:
            self._leave_no_trace()
        if self._thread is None or self._closing.is_set():
            return
        lacking = self.wait_uploaded(self._config.stop_wait_s)
        if lacking is not None:
            log.warning("%s; the local copy is complete, and the next start uploads it", lacking)
        self._closing.set()
        with self._state:
            self._state.notify_all()
        if lacking is None:
            self._thread.join()
        self._thread = None

    def _leave_no_trace(self) -> None:
        """A run that has nothing, here or there, keeps its name from nobody."""
        try:
            if self._run is not None and owns_nothing(self._run):
                self.remote.end()
        except FairleadError as error:
            log.warning("the name of this run on %s stays taken: %s", self._store.url, error.block())

    # -- in the thread

    def _add(self, checkpoint: Checkpoint) -> None:
        with self._state:
            self._pending[checkpoint.name] = checkpoint
            if self._thread is None and not self._closing.is_set():
                # A daemon: a process that must end now must not wait for a network.
                self._thread = threading.Thread(target=self._work, name="fairlead-upload", daemon=True)
                self._thread.start()
            self._state.notify_all()

    def _work(self) -> None:
        while True:
            with self._state:
                while not self._pending or self._failure is not None:
                    if self._closing.is_set():
                        return
                    self._state.wait(1.0)
                if self._closing.is_set() or self._lost is not None:
                    return
                checkpoint = max(self._pending.values(), key=lambda item: item.order)
                self._current = checkpoint.name
            failure: FairleadError | None = None
            try:
                self._upload(checkpoint)
            except FairleadError as error:
                failure = error
            except Exception as error:  # reported to the thread that trains; an upload must never end in silence
                failure = CheckpointError(
                    "an upload failed", where=str(checkpoint.path), why=f"{type(error).__name__}: {error}"
                )
            if failure is not None:  # recorded before whoever waits hears of it
                log.warning("%s was not uploaded, the local copy stays: %s", checkpoint.name, failure.block())
                self._event("upload-failed", checkpoint=checkpoint.name, url=self._store.url, error=failure.block())
            with self._state:
                self._current = None
                if failure is None:
                    self._pending.pop(checkpoint.name, None)
                elif checkpoint.order == max(item.order for item in self._pending.values()):
                    self._failure = failure  # else a newer one was saved meanwhile, and is tried
                self._state.notify_all()

    def _upload(self, checkpoint: Checkpoint) -> None:
        began = time.monotonic()
        self._check_owner()
        copy = upload(
            checkpoint.path,
            self._store,
            threads=self._config.parallel_files,
            before_commit=self._before_commit,
        )
        self._event(
            "uploaded",
            checkpoint=checkpoint.name,
            url=copy.url,
            bytes=checkpoint.manifest.size,
            seconds=round(time.monotonic() - began, 3),
        )
        if self._policy is not None:
            discard_incomplete(self._store, before_each=self._check_owner)
            retain_remote(self._store, self._policy, keep={copy.name}, before_each=self._check_owner)

    def _before_commit(self) -> None:
        self._check_owner()
        if self._run is not None:
            save_records(self._run, self._store)
            self._check_owner()  # what follows is the manifest

    def _event(self, name: str, **fields: object) -> None:
        try:
            self._record(name, **fields)
        except RunDirectoryError as error:  # the upload is what it is, whether or not the history has it
            log.warning("the event %r is not in the history: %s", name, error.block())

    def _last_records(self) -> None:
        try:
            if self._run is not None:
                self._check_owner()
                save_records(self._run, self._store)
        except FairleadError as error:
            log.warning("the last lines of metrics and history are not on the store: %s", error.block())

    def _check_owner(self) -> None:
        lost = self.remote.lost(self._store)
        if lost is not None:
            with self._state:
                self._lost = lost
            if self._fence is not None and self._fence.lost is None:
                self._fence.lost = lost  # the training ends with it
            raise lost
