"""What LSF says of a job: why it is to stop, and how it stands. Written from IBM's documentation; never tried."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from fairlead import StopReason
from fairlead.facts import Why
from fairlead_runs.programs import ask
from fairlead_runs.scheduler import JobStatus

# -- why is it to stop?

_ASKED: Final = ("stat", "exit_reason", "time_left", "pend_reason", "suspend_reason")
# Keywords of LSF's termination reasons, in the order in which they count.
_KEYWORDS: Final[tuple[tuple[str, Why], ...]] = (
    (r"TERM_PREEMPT|TERM_RC\b|TERM_REQUEUE_RC|TERM_MC_RECALL|preempt", "preempted"),
    (r"TERM_RUNLIMIT|TERM_DEADLINE|TERM_WINDOW|TERM_CPULIMIT", "time_limit"),
    (r"TERM_REQUEUE_(OWNER|ADMIN)", "requeued"),
    (r"TERM_(FORCE_)?(OWNER|ADMIN)|TERM_BUCKET_KILL", "cancelled"),
    (r"TERM_ZOMBIE|TERM_RMS", "node_failure"),
)
_ENDED: Final[Mapping[str, Why]] = {"PEND": "requeued", "UNKWN": "node_failure", "ZOMBI": "node_failure"}


def ask_lsf(job: str, environ: Mapping[str, str], deadline: float) -> StopReason:
    """Why this job, `17` or `17[3]`, is to stop; `deadline` is on the monotonic clock."""
    state, problem = _bjobs(job, _ASKED, environ, deadline)
    if problem:
        return StopReason("unknown", problem)
    reason = read_bjobs(state)
    if reason.why != "unknown":
        return reason
    history, problem = ask(["bhist", "-l", job], deadline, environ)
    return reason if problem else read_bhist(history, reason)


def read_bjobs(text: str) -> StopReason:
    """The reason in a line of `bjobs -noheader -o "stat exit_reason time_left pend_reason suspend_reason ..."`.

    At the run limit LSF sends SIGUSR2 and grants ten minutes, so `0:0 L` is no hurry: what is left is not known.
    """
    line, fields = _fields(text, _ASKED)
    state, words = fields.get("stat", ""), " ".join(fields.values())
    left = re.fullmatch(r"(\d+):(\d+)(?: [LE])?", fields.get("time_left", ""))
    # E: an estimate, by which nothing is ended.
    remaining = (int(left[1]) * 60 + int(left[2])) * 60.0 if left and "E" not in left[0] else None
    evidence = f"bjobs: {line}" if line else "bjobs printed nothing"
    for pattern, why in _KEYWORDS:
        if found := re.search(pattern, words, re.IGNORECASE):
            requeues = "REQUEUE" in found[0]
            return StopReason(why, evidence, remaining, scheduler_requeues=requeues, may_requeue=True)
    if state in _ENDED:
        return StopReason(_ENDED[state], evidence, remaining, scheduler_requeues=state == "PEND", may_requeue=True)
    if state == "RUN" and remaining == 0:
        return StopReason("time_limit", evidence, may_requeue=True)
    return StopReason("unknown", evidence, remaining, may_requeue=True if line else None)


def read_bhist(text: str, reason: StopReason) -> StopReason:
    """The reason with what the job's history adds: whether a user requested its end.

    Only signals that end a job count; a person who sends SIGUSR1 asks for something else.
    """
    events = " ".join(text.split())  # the lines are broken anywhere
    last = re.findall(r"Signal <(\w+)> requested by user or administrator <([^>]*)>", events)[-1:]
    if last and last[0][0].removeprefix("SIG") in ("KILL", "TERM", "INT"):
        evidence = f"bhist: signal {last[0][0]} requested by {last[0][1]}"
        return StopReason("cancelled", evidence, reason.remaining_s, may_requeue=True)
    return reason


# -- how does it stand?

State = Literal["queued", "running", "ending", "ended", "unknown"]

_SHOWN: Final = ("stat", "run_time", "time_left", "pend_reason")
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
    answer, problem = _bjobs(job, _SHOWN, environ, deadline)
    return JobStatus("unknown", problem) if problem else read_status(answer, time.time())


def read_status(text: str, now: float) -> JobStatus:
    """The status in a line of `bjobs -noheader -o "stat run_time time_left pend_reason delimiter='|'"`."""
    line, fields = _fields(text, _SHOWN)
    stat = fields.get("stat", "")
    state = _STATES.get(stat, "unknown")
    ran = re.match(r"(\d+) second", fields.get("run_time", ""))
    left = re.fullmatch(r"(\d+):(\d+)(?: L)?", fields.get("time_left", ""))  # with E it is an estimate
    pending = fields.get("pend_reason", "-")
    return JobStatus(
        state,
        stat or line or "bjobs printed nothing about the job",
        pending.rstrip(";.") if state == "queued" and pending != "-" else "",
        since=now - int(ran[1]) if ran and state == "running" else None,
        ends=now + (int(left[1]) * 60 + int(left[2])) * 60 if left and state == "running" else None,
    )


def _bjobs(job: str, fields: Sequence[str], environ: Mapping[str, str], deadline: float) -> tuple[str, str]:
    """What `bjobs` shows of a job, and why it does not."""
    return ask(["bjobs", "-noheader", "-o", f"{' '.join(fields)} delimiter='|'", job], deadline, environ)


def _fields(text: str, names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The first line of an answer, and its fields."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line, dict(zip(names, (field.strip() for field in line.split("|", len(names) - 1)), strict=False))
