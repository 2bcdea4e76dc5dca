"""The run directory: it belongs to one fingerprint, is held by one job at a time, and says what it holds."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fairlead import yaml
from fairlead.errors import FingerprintError, RunDirectoryError, did_you_mean
from fairlead_runs.commit import Lock, LockOwner, Syscalls, atomic_write
from fairlead_runs.commit.files import disk_error, ensure_dir
from fairlead_runs.fingerprints import Fingerprint, leaves, limits
from fairlead_runs.heartbeat import Heartbeat, heartbeat_path
from fairlead_runs.history import History, read_history
from fairlead_runs.provenance import CodeChange, code_change
from fairlead_runs.redaction import redact
from fairlead_runs.states import FINGERPRINT_FILE, HISTORY_FILE, LOCK_FILE

JOB_FILE = "job.yaml"
_FILES = {JOB_FILE, FINGERPRINT_FILE, HISTORY_FILE, "metrics.csv"}
_OURS = {*_FILES, "starts", "checkpoints", "logs", "heartbeats", "stacks", "flight-recorder"}
_OURS_TOO = (LOCK_FILE, ".tmp-", "predictions-")
_FOLDERS = ("starts", "checkpoints", "logs", "heartbeats")


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
        syscalls: Syscalls | None = None,
    ) -> RunDirectory:
        """Creates or continues the run directory of a job, and takes its lock.  Nothing is written when it refuses.

        Args:
            path: `run_path(...)`.
            job: The job as mappings and lists; kept as `job.yaml`, secrets redacted.
            fingerprint: `fingerprint(job)`.
            resume: `auto`: continue the run if it has this fingerprint.  `never`: use a new sibling `name-2`,
                `name-3`, ...  A path: continue and load that checkpoint; with another fingerprint in a sibling.
                A job that its scheduler restarted always continues what its first attempt began.
            owner: Who holds the lock; None: this process.

        Raises:
            FingerprintError: The directory holds a run with other settings; each with its old and new value.
            RunLockedError: Another live process uses it.
            RunDirectoryError: It cannot be written, a file is in the way, or it holds something else.
        """
        me = owner or LockOwner.here()
        path, resume = _choose(path, resume, fingerprint, me, syscalls or Syscalls())
        stored = stored_fingerprint(path)
        run = cls(path, syscalls=syscalls)
        run.load = None if str(resume) in ("auto", "never") else Path(resume)
        run._job = redact(job)
        if stored is not None:
            require_same(path, stored, fingerprint)
            if run.load is None and (finished := finished_event(path, job)):
                run.finished, run.continued = finished, True
                return run
        run._take(me, fingerprint)
        return run

    @property
    def checkpoints(self) -> Path:
        """The folder for `fairlead_runs.commit`."""
        return self.path / "checkpoints"

    @property
    def token(self) -> str:
        """This start's token for `fairlead_runs.commit.stage`."""
        return f"s{self.start}"

    def begin(
        self, *, resolution: Mapping[str, Any], provenance: Mapping[str, Any], after: int = 0, **fields: Any
    ) -> int:
        """Records a start, `starts/N/` and the event `start` with `fields`; returns N, which is in the stages' token.

        `after` is the number of a start that this directory may not know of: of a downloaded checkpoint.
        """
        owner = self._held().owner
        starts = self.path / "starts"
        try:
            previous = max((int(name) for name in os.listdir(starts) if name.isdecimal()), default=0)
            previous = max(previous, after)
            folder = starts / str(previous + 1)
            self._system.mkdir(folder)
            self._system.fsync_dir(starts)
        except OSError as error:
            raise disk_error(error, "cannot record a start of the run", starts, RunDirectoryError) from error
        for name, content in (("resolution.json", resolution), ("provenance.json", provenance)):
            text = json.dumps(redact(content), indent=1, ensure_ascii=False, default=str) + "\n"
            atomic_write(folder / name, text.encode(), error=RunDirectoryError, syscalls=self._system)
        self.start = previous + 1
        if previous:
            self.code = code_change(_git(starts / str(previous)), _git(folder))
        if self.accepted:
            fields["accepted"] = list(self.accepted)
        self.history.append(
            "start",
            start=self.start,
            job=owner.job,
            attempt=owner.attempt,
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

    def _take(self, owner: LockOwner, fingerprint: Fingerprint) -> None:
        text = yaml.dump(self._job).encode()  # before anything is made: it may be wrong
        try:
            ensure_dir(self.path, self._system)
        except OSError as error:
            raise disk_error(error, "cannot create the run directory", self.path, RunDirectoryError) from error
        lock = Lock(self.path / LOCK_FILE, owner=owner, syscalls=self._system)
        lock.acquire()
        with contextlib.ExitStack() as undo:
            undo.callback(lock.release)
            stored = stored_fingerprint(self.path)  # another job may have made it since we looked
            if stored is not None:
                require_same(self.path, stored, fingerprint)
                self.continued = True
            try:
                for name in _FOLDERS:
                    ensure_dir(self.path / name, self._system)
                file = self.path / JOB_FILE
                if not file.exists() or file.read_bytes() != text:
                    atomic_write(file, text, error=RunDirectoryError, syscalls=self._system)
            except OSError as error:
                raise disk_error(error, "cannot write the run directory", self.path, RunDirectoryError) from error
            if stored is not None:
                self.accepted = tuple(str(one) for one in stored.differences(fingerprint))
            if stored is None or self.accepted:  # last: with it, this is a run
                target = self.path / FINGERPRINT_FILE
                atomic_write(target, fingerprint.dump(), error=RunDirectoryError, syscalls=self._system)
            undo.pop_all()
        self.lock = lock

    def _held(self) -> Lock:
        if self.lock is None:
            raise RunDirectoryError(
                "this process does not hold the run directory", where=str(self.path), fix="use RunDirectory.open"
            )
        self.lock.check()
        return self.lock


def stored_fingerprint(path: Path) -> Fingerprint | None:
    """The fingerprint of the run at `path`; None when there is nothing yet, or only what a killed start left."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise disk_error(error, "cannot read the run directory", path, RunDirectoryError) from error
    if FINGERPRINT_FILE in names:
        return Fingerprint.load(path / FINGERPRINT_FILE)
    foreign = sorted(name for name in names if name not in _OURS and not name.startswith(_OURS_TOO))
    if foreign:
        raise RunDirectoryError(
            "the folder is not empty and holds no run",
            where=str(path),
            why=f"it holds {', '.join(foreign[:5])}{', ...' if len(foreign) > 5 else ''}",
            fix="set another run.name or run.dir, or move these files away",
        )
    return None


def _same(stored: Fingerprint | None, new: Fingerprint) -> bool:
    return stored is not None and new.continues(stored)


def require_same(path: Path, stored: Fingerprint, new: Fingerprint) -> None:
    """Raises `FingerprintError`, with each difference, where the run at `path` is another one."""
    _require_known(path, stored, new)
    different = [str(difference) for difference in new.refused(stored)]
    if not different:
        return
    more = [f"and {len(different) - 20} more"] if len(different) > 20 else []
    raise FingerprintError(
        "the run directory belongs to a run with other settings",
        where=str(path),
        why="\n".join([*different[:20], *more]),
        fix="undo the changes to continue it, or accept those that the run may go on with: --accept data.args.path;\n"
        f"set another run.name, or use --resume never: a new directory beside it ({path.name}-2, ...);\n"
        "or --resume CHECKPOINT: a new directory that starts from a checkpoint of this run",
    )


def _require_known(path: Path, stored: Fingerprint, new: Fingerprint) -> None:
    """Raises where `run.accept` names what neither job has: most likely a slip of the pen."""
    there = [name for one in (stored, new) for name, _ in leaves(one.settings)]
    for accepted in new.accepts:
        if not any(name == accepted or name.startswith((f"{accepted}.", f"{accepted}[")) for name in there):
            near = did_you_mean(accepted, there)
            raise FingerprintError(
                f"there is no setting {accepted!r} to accept",
                where=f"run.accept, for {path}",
                fix=f"did you mean {near}?" if near else "name a setting of the job, as data.args.path",
            )


def _choose(
    path: Path, resume: str | Path, fingerprint: Fingerprint, owner: LockOwner, system: Syscalls
) -> tuple[Path, str | Path]:
    """Which directory this job uses, the asked one or a sibling, and how it resumes there."""
    if str(resume) == "auto":
        return path, resume
    for candidate in (path, *itertools.takewhile(Path.exists, _siblings(path))):
        if _began_by(candidate, owner) and _same(stored_fingerprint(candidate), fingerprint):
            return candidate, "auto"
    if str(resume) == "never":
        return _made(itertools.chain([path], _siblings(path)), system), resume
    stored = stored_fingerprint(path)
    return (path if stored is None or _same(stored, fingerprint) else _made(_siblings(path), system)), resume


def _siblings(path: Path) -> Iterator[Path]:
    """The names beside a run directory: `name-2`, `name-3`, ..."""
    return (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))


def _made(candidates: Iterator[Path], system: Syscalls) -> Path:
    """The first of them that can be made: of two jobs at once one gets the name and the other the next."""
    for path in candidates:
        try:
            ensure_dir(path.parent, system)
            system.mkdir(path)
            system.fsync_dir(path.parent)
        except FileExistsError:  # also when it is empty: another job may just have made it
            continue
        except OSError as error:
            raise disk_error(error, "cannot create the run directory", path, RunDirectoryError) from error
        return path
    raise AssertionError("the names never end")


def _began_by(path: Path, owner: LockOwner) -> bool:
    """Whether an earlier attempt of the same scheduler job last started the run at `path`."""
    if owner.job is None or not path.is_dir():
        return False
    starts = [event for event in read_history(path / HISTORY_FILE) if event["event"] == "start"]
    start = starts[-1] if starts else {}
    attempt = start.get("attempt")
    return start.get("job") == owner.job and isinstance(attempt, int) and attempt < owner.attempt


def finished_event(path: Path, job: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The last event `finished`, if nothing was started after it and the job does not ask for more."""
    ends = [e for e in read_history(path / HISTORY_FILE) if e["event"] in ("start", "finished")]
    if ends and ends[-1]["event"] == "finished" and ends[-1].get("limits") == limits(job):
        return ends[-1]
    return None


def _git(start: Path) -> Mapping[str, Any] | None:
    try:
        found = json.loads((start / "provenance.json").read_bytes())
    except (OSError, ValueError):
        return None  # a start that was killed before it was written
    git = found.get("git") if isinstance(found, dict) else None
    return git if isinstance(git, dict) else None
