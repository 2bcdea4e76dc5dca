"""Why a job of Grid Engine is to stop, as `qstat -r -xml` shows it; after qstat(1) of Grid Engine 8.1."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from xml.etree import ElementTree

from fairlead import StopReason
from fairlead_runs.programs import ask


def ask_qstat(job: str, environ: Mapping[str, str], deadline: float) -> StopReason:
    """Why this job, `4711` or `4711.3`, is to stop; `deadline` is on the monotonic clock."""
    answer, problem = ask(["qstat", "-r", "-xml"], deadline, environ)
    return StopReason("unknown", problem) if problem else read_qstat(answer, job, time.time())


def read_qstat(answer: str, job: str, now: float) -> StopReason:
    """The reason in the answer of `qstat -r -xml`, which lists the user's jobs."""
    number, _, task = job.partition(".")
    try:
        jobs = ElementTree.fromstring(answer).iter("job_list")
        mine = [one for one in jobs if one.findtext("JB_job_number") == number and one.findtext("tasks", "") == task]
    except ElementTree.ParseError as error:
        return StopReason("unknown", f"qstat's answer is no XML: {error}")
    if not mine:
        return StopReason("unknown", f"qstat does not list job {job}")
    state = mine[0].findtext("state", "")
    left = _left(mine[0], now)
    evidence = f"qstat: state {state}"
    if "d" in state:  # a person's qdel; at its time limit a job is ended without it
        return StopReason("cancelled", evidence, left)
    if "q" in state:  # pending: `qmod -rj` came before us
        return StopReason("requeued", evidence, left, scheduler_requeues=True)
    if "S" in state or "T" in state:  # a queue that yields to another, or to the load of its host
        return StopReason("preempted", evidence, left)
    return StopReason("unknown", evidence, left)


def _left(job: ElementTree.Element, now: float) -> float | None:
    """Seconds until the hard limit on the run time; None without one."""
    limits = [one.text for one in job.iter("hard_request") if one.get("name") == "h_rt"]
    try:
        started = datetime.fromisoformat(job.findtext("JAT_start_time", "")).timestamp()
        return max(0.0, started + float(limits[0] or "") - now)
    except (IndexError, ValueError):
        return None
