"""What LSF says of a job, asked from outside of it: one `bjobs`. Written from IBM's documentation; never tried."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Final, Literal

from fairlead_runs.programs import ask
from fairlead_runs.scheduler import JobStatus

State = Literal["queued", "running", "ending", "ended", "unknown"]

_FIELDS: Final = ("stat", "run_time", "time_left", "pend_reason")
_STATES: Final[Mapping[str, State]] = {
    "PEND": "queued",
    "PSUSP": "queued",
    "WAIT": "queued",
    "RUN": "running",
    "USUSP": "running",
    "SSUSP": "running",
    "UNKWN": "running",
    "DONE": "ended",
    "EXIT": "ended",
    "ZOMBI": "ended",
}


def ask_for(job: str, environ: Mapping[str, str], deadline: float) -> JobStatus:
    """The status of a job, `17` or `17[3]`; `deadline` is on the monotonic clock."""
    fields = f"{' '.join(_FIELDS)} delimiter='|'"
    answer, problem = ask(["bjobs", "-noheader", "-o", fields, job], deadline, environ)
    return JobStatus("unknown", problem) if problem else read_status(answer, time.time())


def read_status(text: str, now: float) -> JobStatus:
    """The status in a line of `bjobs -noheader -o "stat run_time time_left pend_reason delimiter='|'"`."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    fields = dict(zip(_FIELDS, (field.strip() for field in line.split("|", len(_FIELDS) - 1)), strict=False))
    said = fields.get("stat", "")
    state = _STATES.get(said, "unknown")
    ran = re.match(r"(\d+) second", fields.get("run_time", ""))
    left = re.fullmatch(r"(\d+):(\d+)(?: L)?", fields.get("time_left", ""))  # with E it is an estimate
    pending = fields.get("pend_reason", "-")
    return JobStatus(
        state,
        said or line or "bjobs said nothing of the job",
        pending.rstrip(";.") if state == "queued" and pending != "-" else "",
        since=now - int(ran[1]) if ran and state == "running" else None,
        ends=now + (int(left[1]) * 60 + int(left[2])) * 60 if left and state == "running" else None,
    )
