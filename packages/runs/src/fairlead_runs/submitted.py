"""What a submission leaves in the directory of each of its runs: `submissions/N/submission.json`."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from fairlead.errors import RunDirectoryError
from fairlead_runs.commit.files import disk_error

SUBMISSIONS: Final = "submissions"
"""The folder in a run directory: one for each submission, numbered, with `submission.json`."""
LOCAL: Final = "local"
"""What `to` is in the record of a sweep that runs on this machine, in no scheduler."""
VARIABLE: Final = "FAIRLEAD_SNAPSHOT"
"""Names the file that says of which repository, commit and changes the code of a submitted job is a copy."""
_FILE: Final = "submission.json"


@dataclass(frozen=True)
class Record:
    """One run of a submission.

    Args:
        to: The tag of the scheduler.
        id: The job's id there; of an array's task its own, such as `17_3`.
        index: The index in the array; None outside of one.
        run: The run directory.
        runs: All of the submission, as texts.
        submitted: When, UTC.
        job: The id of the submission.
        folder: The folder of the submission: job files, scripts, the copy of the code.
        output: The file that the scheduler writes the output to, `*` for what differs; None: it writes none.
        submit: The job's `submit`.
        cwd: Where the ranks work.
        sweep: The overrides of this member.
    """

    to: str
    id: str
    index: int | None
    run: str
    runs: tuple[str, ...]
    submitted: str
    job: str = ""
    folder: str = ""
    output: str | None = None
    submit: Mapping[str, Any] = field(default_factory=dict)
    cwd: str = ""
    sweep: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Writes it to a folder, atomically."""
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{_FILE}.part"
        part.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(part, folder / _FILE)


def numbers(run: Path) -> list[int]:
    """The numbers of the submissions of a run, in order."""
    try:
        return sorted(int(one.name) for one in (run / SUBMISSIONS).iterdir() if one.name.isdecimal())
    except OSError:
        return []


def next_number(*runs: Path) -> int:
    """A number that no submission of these runs has."""
    return 1 + max((number for run in runs for number in numbers(run)), default=0)


def _records(folder: Path) -> Iterator[Record]:
    """Those that can be read, the newest first; others were refused, or are only being made."""
    for number in reversed(numbers(folder)):
        try:
            data = json.loads((folder / SUBMISSIONS / str(number) / _FILE).read_text(encoding="utf-8"))
            yield Record(**{**data, "runs": tuple(data["runs"]), "sweep": tuple(data.get("sweep", ()))})
        except (FileNotFoundError, PermissionError, ValueError, TypeError, KeyError):
            continue
        except OSError as error:  # a file system that does not answer: the run may be in the queue
            raise disk_error(error, "cannot read a submission", folder, RunDirectoryError) from error


def read_submission(folder: Path) -> Record | None:
    """The newest submission of a run, or of what the members of a sweep share; None: it was never submitted."""
    return next(_records(folder), None)


def queued_submission(run: Path) -> Record | None:
    """The newest submission of a run to a scheduler, and not to this machine; None: there is none."""
    return next((one for one in _records(run) if one.to != LOCAL), None)


def submitted_at(run: Path) -> float | None:
    """When a run was submitted first, in seconds since the epoch; None: it was not."""
    times = [datetime.datetime.fromisoformat(one.submitted).timestamp() for one in _records(run)]
    return times[-1] if times else None


def members(folder: Path) -> list[Path]:
    """The run directories of the newest sweep or array that was submitted here; none where there is none."""
    record = read_submission(folder)
    return [Path(run) for run in record.runs] if record is not None and record.index is not None else []


def submitted_job(run: Path) -> Path | None:
    """The job file of the newest submission of a run; None: there is none."""
    record = read_submission(run)
    if record is None or not record.folder:
        return None
    files = (Path(record.folder, "members", f"{record.index}.yaml"), Path(record.folder, "job.yaml"))
    return next((file for file in files if file.is_file()), None)


def was_submitted(run: Path) -> bool:
    """Whether this is the directory of a run that was submitted, also where it has not started yet."""
    record = read_submission(run)
    # By the name, as it may have been moved; what the members of a sweep share is none of its runs.
    return record is not None and run.absolute().name in {Path(one).name for one in record.runs}


def submitted_code(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """git's state of the code when the job was submitted, with `snapshot`, the copy that runs; None: none does."""
    file = environ.get(VARIABLE)
    if not file:
        return None
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "snapshot" in content else None
