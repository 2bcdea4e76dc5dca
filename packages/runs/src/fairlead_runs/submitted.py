"""What a submission leaves in a run directory, and what of it a start and `fairlead runs` read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

SUBMISSIONS: Final = "submissions"
"""The folder in a run directory: one for each submission, numbered, with `submission.json`."""
VARIABLE: Final = "FAIRLEAD_SNAPSHOT"
"""Names the file that says of which repository, commit and changes the code of a submitted job is a copy."""


def numbers(run: Path) -> list[int]:
    """The numbers of the submissions of a run, in order."""
    try:
        return sorted(int(one.name) for one in (run / SUBMISSIONS).iterdir() if one.name.isdecimal())
    except OSError:
        return []


def members(folder: Path) -> list[Path]:
    """The run directories of the newest sweep or array that was submitted here; none where there is none."""
    for number in reversed(numbers(folder)):
        try:
            data = json.loads((folder / SUBMISSIONS / str(number) / "submission.json").read_text(encoding="utf-8"))
            return [Path(run) for run in data["runs"]] if data["index"] is not None else []
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return []


def submitted_code(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """What git said of the code when the job was submitted, with `snapshot`, the copy that runs; None: none does."""
    file = environ.get(VARIABLE)
    if not file:
        return None
    try:
        said = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) and "snapshot" in said else None
