"""The run directory: it belongs to one fingerprint, is held by one job at a time, and says what it holds."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fairlead import yaml
from fairlead.errors import RunDirectoryError
from fairlead.interpolation import escape
from fairlead_runs.commit import Fence, Lock, LockOwner, Syscalls, atomic_write, discard_incomplete
from fairlead_runs.commit.files import disk_error, ensure_dir
from fairlead_runs.fingerprints import Fingerprint, limits
from fairlead_runs.heartbeat import Heartbeat, heartbeat_path
from fairlead_runs.history import History
from fairlead_runs.ownership import (
    FOLDERS,
    JOB_FILE,
    choose_directory,
    finished_event,
    require_same,
    same_run,
    stored_fingerprint,
)
from fairlead_runs.provenance import CodeChange, code_change
from fairlead_runs.redaction import redact
from fairlead_runs.states import FINGERPRINT_FILE, HISTORY_FILE, LOCK_FILE

_NOBODY = "-"  # the token of no start: this one has no stages yet


class RunDirectory:
    """A run's folder.  `RunDirectory.open` for the one process that writes (rank 0), `RunDirectory(path)` for others.

    Other ranks compute the same path from the job (`run_path`) and write only their own logs and heartbeats; with
    `--resume never`, or another fingerprint and a PATH, rank 0 chooses a sibling, which the others learn from it.

    Attributes:
        finished: The `finished` event of a run that has nothing left to do; then nothing is locked or written.
        continued: Whether the run existed before.
        accepted: What this job has changed in the run, as `run.accept` allows it.
        load: The checkpoint that `--resume PATH` named, or None: its own newest complete one.
        start: The number of this start, 0 before `begin`.
        code: After `begin`: whether the code changed since the start before.
    """

    def __init__(self, path: Path, *, rank: int = 0, syscalls: Syscalls | None = None) -> None:
        self.path = path
        self.history = History(path / HISTORY_FILE, rank=rank, syscalls=syscalls)
        self.finished: Mapping[str, Any] | None = None
        self.continued = False
        self.accepted: tuple[str, ...] = ()
        self.load: Path | None = None
        self.start = 0
        self.code = CodeChange(None, "unknown: this is the first start")
        self.lock: Lock | None = None
        self._job: Mapping[str, Any] = {}
        self._system = syscalls or Syscalls()

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        job: Mapping[str, Any],
        fingerprint: Fingerprint,
        resume: str | Path = "auto",
        owner: LockOwner | None = None,
        wait: bool = False,
        ended: Callable[[LockOwner], str | None] | None = None,
        syscalls: Syscalls | None = None,
    ) -> RunDirectory:
        """Creates or continues the run directory of a job, and takes its lock.  Nothing is written when it refuses.

        A run that has no step and no checkpoint owns nothing: one with other settings replaces it.

        Args:
            path: `run_path(...)`.
            job: The job as mappings and lists; stored as `job.yaml`, secrets redacted.
            fingerprint: `fingerprint(job)`.
            resume: `auto`: continue the run if it has this fingerprint.  `never`: use a new sibling `name-2`,
                `name-3`, ...  A path: continue and load that checkpoint; with another fingerprint in a sibling.
                A job that its scheduler restarted always continues what its first attempt began.
            owner: Who holds the lock; None: this process.
            wait: Whether to wait for an owner that says nothing, until it does, or is taken over; see `Lock.acquire`.
            ended: Why the job of an owner is over, as its scheduler says; likewise.

        Raises:
            FingerprintError: The directory holds a run with other settings; each with its old and new value.
            RunLockedError: Another live process uses it.
            RunDirectoryError: It cannot be written, a file is in the way, or it holds something else.
        """
        me = owner or LockOwner.here()
        path, resume = choose_directory(path, resume, fingerprint, me, syscalls or Syscalls())
        stored = stored_fingerprint(path)
        run = cls(path, syscalls=syscalls)
        run.load = None if str(resume) in ("auto", "never") else Path(resume)
        run._job = redact(job)
        if stored is not None:
            require_same(path, stored, fingerprint)
            if run.load is None and same_run(stored, fingerprint) and (finished := finished_event(path, job)):
                run.finished, run.continued = finished, True
                return run
        run._take(me, fingerprint, wait=wait, ended=ended)
        return run

    @property
    def checkpoints(self) -> Path:
        """The folder for `fairlead_runs.commit`."""
        return self.path / "checkpoints"

    @property
    def fence(self) -> Fence | None:
        """What is checked before each change of the run; None of a run that is finished, or was only read."""
        return self.lock.fence if self.lock is not None else None

    @property
    def token(self) -> str:
        """This start's token for `fairlead_runs.commit.stage`."""
        return f"s{self.start}"

    def begin(
        self, *, resolution: Mapping[str, Any], provenance: Mapping[str, Any], after: int = 0, **fields: Any
    ) -> int:
        """Records a start, `starts/N/` and the event `start` with `fields`; returns N, which is in the stages' token.

        It is higher than that of any start before.  `after` is one that this directory may not know of: of a downloaded
        checkpoint, or of the last owner elsewhere.
        """
        lock = self._held()
        starts = self.path / "starts"
        try:
            known = [int(name) for name in os.listdir(starts) if name.isdecimal()]
            recorded = (event.get("start", 0) for event in self.history.read() if event["event"] == "start")
            previous = max(after, 0, *known, *recorded)
            folder = starts / str(previous + 1)
            self._system.mkdir(folder)
            self._system.fsync_dir(starts)
            lock.began(previous + 1)
        except OSError as error:
            raise disk_error(error, "cannot record a start of the run", starts, RunDirectoryError) from error
        for name, content in (("resolution.json", resolution), ("provenance.json", provenance)):
            text = json.dumps(redact(content), indent=1, ensure_ascii=False, default=str) + "\n"
            atomic_write(folder / name, text.encode(), error=RunDirectoryError, syscalls=self._system)
        self.start = self.history.start = previous + 1
        if known:
            self.code = code_change(_git(starts / str(max(known))), _git(folder))
        if lock.took_over is not None:
            fields["took_over"] = lock.took_over
        if self.accepted:
            fields["accepted"] = list(self.accepted)
        self.history.append(
            "start",
            job=lock.owner.job,
            attempt=lock.owner.attempt,
            code_changed=self.code.changed,
            **fields,
        )
        return self.start

    def finish(self, **fields: Any) -> None:
        """Records that the run has reached its end: the next start says so, unless its limits are higher."""
        self._held()
        self.history.append("finished", limits=limits(self._job), **fields)

    def heartbeat(self, *, node_rank: int, local_rank: int, rank: int, start: int = 0) -> Heartbeat:
        """The heartbeat of one rank in a start; every rank may call this."""
        return Heartbeat(heartbeat_path(self.path / "heartbeats", node_rank), local_rank, rank, start=start)

    def close(self) -> None:
        """Releases the lock; may be called twice."""
        if self.lock is not None:
            self.lock.release()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take(self, owner: LockOwner, fingerprint: Fingerprint, **how: Any) -> None:
        text = yaml.dump(escape(self._job)).encode()  # before anything is made: it may be wrong
        try:
            ensure_dir(self.path, self._system)
        except OSError as error:
            raise disk_error(error, "cannot create the run directory", self.path, RunDirectoryError) from error
        lock = Lock(self.path / LOCK_FILE, owner=owner, syscalls=self._system)
        lock.acquire(**how)
        with contextlib.ExitStack() as undo:
            undo.callback(lock.release)
            stored = stored_fingerprint(self.path)  # another job may have made it since we looked
            if stored is not None:
                require_same(self.path, stored, fingerprint)
                self.continued = same_run(stored, fingerprint)
            # Before anything here is looked at: an earlier owner may only be frozen.
            discard_incomplete(self.checkpoints, token=_NOBODY, syscalls=self._system)
            try:
                for name in FOLDERS:
                    ensure_dir(self.path / name, self._system)
                file = self.path / JOB_FILE
                if not file.exists() or file.read_bytes() != text:
                    atomic_write(file, text, error=RunDirectoryError, syscalls=self._system, fence=lock.fence)
            except OSError as error:
                raise disk_error(error, "cannot write the run directory", self.path, RunDirectoryError) from error
            if self.continued and stored is not None:
                self.accepted = tuple(str(one) for one in stored.differences(fingerprint))
            if not self.continued or self.accepted:  # last: with it, this is a run
                target, content = self.path / FINGERPRINT_FILE, fingerprint.dump()
                atomic_write(target, content, error=RunDirectoryError, syscalls=self._system, fence=lock.fence)
            undo.pop_all()
        self.lock = lock
        self.history = History(self.path / HISTORY_FILE, fence=lock.fence, syscalls=self._system)

    def _held(self) -> Lock:
        if self.lock is None:
            raise RunDirectoryError(
                "this process does not hold the run directory", where=str(self.path), fix="use RunDirectory.open"
            )
        try:
            self.lock.fence.check()
        except OSError as error:
            raise disk_error(error, "cannot read the lock of the run", self.lock.path, RunDirectoryError) from error
        return self.lock


def _git(start: Path) -> Mapping[str, Any] | None:
    try:
        found = json.loads((start / "provenance.json").read_bytes())
    except (OSError, ValueError):
        return None  # a start that was killed before it was written
    git = found.get("git") if isinstance(found, dict) else None
    return git if isinstance(git, dict) else None
