"""What a submission leaves in a run directory, and what of it a start and `fairlead runs` read."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

SUBMISSIONS: Final = "submissions"
"""The folder in a run directory: one for each submission, numbered, with `submission.json`."""
LOCAL: Final = "local"
"""What `to` is in the record of a sweep that runs on this machine, in no scheduler."""
VARIABLE: Final = "FAIRLEAD_SNAPSHOT"
"""Names the file that says of which repository, commit and changes the code of a submitted job is a copy."""


def numbers(run: Path) -> list[int]:
    """The numbers of the submissions of a run, in order."""
    try:
        return sorted(int(one.name) for one in (run / SUBMISSIONS).iterdir() if one.name.isdecimal())
    except OSError:
        return []


def submitted_at(run: Path) -> float | None:
    """When a run was submitted first, in seconds since the epoch; None: it was not, or nobody can tell."""
    for number in numbers(run):
        try:
            data = json.loads((run / SUBMISSIONS / str(number) / "submission.json").read_text(encoding="utf-8"))
            return datetime.datetime.fromisoformat(data["submitted"]).timestamp()
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it was refused
    return None


def newest(folder: Path) -> Mapping[str, Any] | None:
    """The record of the newest submission here, as `submission.json` has it; None: there is none that can be read."""
    for number in reversed(numbers(folder)):
        try:
            data = json.loads((folder / SUBMISSIONS / str(number) / "submission.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # it was refused, or is only being made
        if isinstance(data, dict) and {"to", "id", "index", "run", "runs", "submitted"} <= data.keys():
            return data
    return None


def members(folder: Path) -> list[Path]:
    """The run directories of the newest sweep or array that was submitted here; none where there is none."""
    data = newest(folder)
    return [Path(run) for run in data["runs"]] if data is not None and data["index"] is not None else []


def submitted_job(run: Path) -> Path | None:
    """The job file of the newest submission of a run; None: there is none."""
    data = newest(run)
    if data is None or not data.get("folder"):
        return None
    files = (Path(data["folder"], "members", f"{data['index']}.yaml"), Path(data["folder"], "job.yaml"))
    return next((file for file in files if file.is_file()), None)


def is_scheduled(folder: Path) -> bool:
    """Whether the newest submission here went to a scheduler, and not to this machine."""
    data = newest(folder)
    return data is not None and data["to"] != LOCAL


def was_submitted(run: Path) -> bool:
    """Whether this is the directory of a run that was submitted, also where it has not started yet."""
    data = newest(run)
    # By the name, as it may have been moved; what the members of a sweep share is none of its runs.
    return data is not None and run.absolute().name in {Path(one).name for one in data["runs"]}


def submitted_code(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """What git said of the code when the job was submitted, with `snapshot`, the copy that runs; None: none does."""
    file = environ.get(VARIABLE)
    if not file:
        return None
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "snapshot" in content else None
