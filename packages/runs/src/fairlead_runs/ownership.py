"""Whose run a directory holds: which directory a job takes, and why it may not."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fairlead.errors import FingerprintError, RunDirectoryError, did_you_mean
from fairlead_runs.commit import LockOwner, Syscalls
from fairlead_runs.commit.checkpoints import NAME
from fairlead_runs.commit.files import disk_error, ensure_dir
from fairlead_runs.exclusion import SCREENS
from fairlead_runs.fingerprints import Difference, Fingerprint, leaves, limits
from fairlead_runs.history import read_history
from fairlead_runs.states import FINGERPRINT_FILE, HISTORY_FILE, LOCK_FILE, PLAN_FILE
from fairlead_runs.submitted import SUBMISSIONS
from fairlead_runs.switches import SAVE, STOP

JOB_FILE: Final = "job.yaml"
FOLDERS: Final = ("starts", "checkpoints", "logs", "heartbeats")
_METRICS: Final = "metrics.csv"
_OURS: Final = {
    *(JOB_FILE, FINGERPRINT_FILE, HISTORY_FILE, _METRICS, *FOLDERS),
    *("stacks", "flight-recorder", SUBMISSIONS, SCREENS, SAVE, STOP, PLAN_FILE),
}
_OURS_TOO: Final = (LOCK_FILE, ".tmp-", "predictions-")


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


def same_run(stored: Fingerprint | None, new: Fingerprint) -> bool:
    """Whether the run that is there, if any, is this one."""
    return stored is not None and new.continues(stored)


def require_same(path: Path, stored: Fingerprint, new: Fingerprint) -> None:
    """Raises `FingerprintError`, with each difference, where the run at `path` is another one, and owns something."""
    _require_known(path, stored, new)
    refused = list(new.refused(stored))
    different = list(map(str, refused))
    if not different or owns_nothing(path):
        return
    more = [f"and {len(different) - 20} more"] if len(different) > 20 else []
    raise FingerprintError(
        "the run directory belongs to a run with other settings",
        where=str(path),
        why="\n".join([*different[:20], *more]),
        fix=f"undo the changes to continue it, or accept those that make no difference: {_accepting(refused)};\n"
        f"set another run.name, or use --resume never: a new directory beside it ({path.name}-2, ...);\n"
        "or --resume CHECKPOINT: a new directory that starts from a checkpoint of this run",
    )


def _accepting(different: Sequence[Difference]) -> str:
    """The words that accept these differences: a setting stands for all below it."""
    paths = [one.path for one in different]
    names = [name for name in paths if not any(name.startswith((f"{other}.", f"{other}[")) for other in paths)]
    shown = " ".join(f"--accept {name}" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} ... ({len(names)} settings)"


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


def owns_nothing(path: Path) -> bool:
    """Whether a run has no checkpoint and never reached its end: nothing was saved that could be lost with it."""
    try:
        saved = any(NAME.fullmatch(name) for name in os.listdir(path / "checkpoints"))
    except FileNotFoundError:
        saved = False
    except OSError as error:
        raise disk_error(error, "cannot read the run directory", path, RunDirectoryError) from error
    return not saved and all(event.get("event") != "finished" for event in read_history(path / HISTORY_FILE))


def choose_directory(
    path: Path, resume: str | Path, fingerprint: Fingerprint, owner: LockOwner, system: Syscalls
) -> tuple[Path, str | Path]:
    """Which directory this job uses, the requested one or a sibling, and how it resumes there."""
    if str(resume) == "auto":
        return path, resume
    for candidate in (path, *itertools.takewhile(Path.exists, _siblings(path))):
        if _began_by(candidate, owner) and same_run(stored_fingerprint(candidate), fingerprint):
            return candidate, "auto"
    if str(resume) == "never":
        return _made(itertools.chain([path], _siblings(path)), system), resume
    stored = stored_fingerprint(path)
    free = stored is None or same_run(stored, fingerprint) or owns_nothing(path)
    return (path if free else _made(_siblings(path), system)), resume


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
