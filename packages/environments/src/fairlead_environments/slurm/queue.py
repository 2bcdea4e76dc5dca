"""What SLURM says of a job, asked from outside of it: one `scontrol show job`; seen with Slurm 22.05."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal

from fairlead_environments.slurm.reasons import fields_of, local_time
from fairlead_runs.programs import ask
from fairlead_runs.scheduler import JobStatus, RunJob

State = Literal["queued", "running", "ending", "ended", "unknown"]

_QUEUED: Final = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_RUNNING: Final = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT")
_ENDING: Final = ("COMPLETING",)
_FORMAT: Final = "%i|%T|%r|%S|%e"
# By what a reason begins with: SLURM has some two hundred, and new ones in each version.
_WHY: Final[Mapping[str, str]] = {
    "BeginTime": "waits for its earliest start: after a requeue SLURM lets a job wait, 120 s by default",
    "Resources": "waits until nodes are free; it is next",
    "Priority": "waits behind jobs with a higher priority",
    "DependencyNeverSatisfied": "never starts: the job that it depends on has ended in another way",
    "Dependency": "waits for another job",
    "JobHeldUser": "is held by its user: scontrol release",
    "JobHeldAdmin": "is held by an administrator",
    "JobHoldMaxRequeue": "is held: it was restarted as often as the cluster allows",
    "launch_failed_requeued_held": "is held: its nodes could not start it; scontrol release",
    "ReqNodeNotAvail": "waits for nodes that are down, drained or reserved",
    "PartitionTimeLimit": "never starts: its time limit is longer than its partition's",
    "PartitionNodeLimit": "never starts: it wants more nodes than its partition has",
    "PartitionDown": "waits for its partition, which is closed",
    "AssocGrp": "waits for a limit of its account",
    "AssocMax": "waits for a limit of its account",
    "QOS": "waits for a limit of its quality of service",
    "Licenses": "waits for licences",
    "JobArrayTaskLimit": "waits for other tasks of its array",
}


def ask_for(job: RunJob, environ: Mapping[str, str], deadline: float) -> JobStatus:
    """The status of a job, or of its chain; `deadline` is on the monotonic clock."""
    environ = {**environ, "SLURM_TIME_FORMAT": "standard"}
    if job.chain is not None:
        words = ["squeue", "--noheader", f"--user={os.getuid()}", f"--name={job.chain}", f"--format={_FORMAT}"]
        answer, problem = ask(words, deadline, environ)
        return JobStatus("unknown", problem) if problem else read_chain(answer, job.chain)
    number = job.id.partition(":")[2]
    answer, problem = ask(["scontrol", "show", "job", "-o", number], deadline, environ)
    if "Invalid job id" in problem:
        return JobStatus("unknown", f"SLURM knows no job {number} any more")
    if problem:
        return JobStatus("unknown", problem)
    lines = answer.splitlines()
    # The number of an array's last task is that of the array, and all tasks are shown.
    line = next((one for one in lines if re.match(rf"JobId={re.escape(number)}\b", one)), "".join(lines[:1]))
    return read_status(fields_of(line))


def read_chain(text: str, chain: str) -> JobStatus:
    """The status of the job of a chain that runs, or else is next, in lines of `squeue --format=%i|%T|%r|%S|%e`."""
    names = ("JobId", "JobState", "Reason", "StartTime", "EndTime")
    jobs = [dict(zip(names, line.split("|"), strict=False)) for line in text.splitlines() if line]
    if not jobs:
        return JobStatus("ended", f"no job of the chain {chain} is left")
    order = ("running", "ending", "queued", "ended", "unknown")
    first = min(jobs, key=lambda job: (order.index(_state(job.get("JobState", ""))), int(job["JobId"])))
    # squeue says in the reason of a job that runs nothing, or the names of its nodes.
    first["Reason"] = first.get("Reason", "") if _state(first.get("JobState", "")) == "queued" else "None"
    status = read_status({**first, "TimeLimit": "of the job"})
    return replace(status, said=f"{status.said}, of {len(jobs)} left", job=f"slurm:{first['JobId']}")


def read_status(fields: Mapping[str, str]) -> JobStatus:
    """The status in the fields of a line of `scontrol show job -o`; fields that a version lacks are not known."""
    said, reason = fields.get("JobState", ""), fields.get("Reason", "None")
    state = _state(said)
    if state == "unknown":
        return JobStatus(state, said or "scontrol said nothing of the job")
    restarts = fields.get("Restarts", "")
    begins, ends = local_time(fields.get("StartTime")), local_time(fields.get("EndTime"))
    return JobStatus(
        state,
        said if reason in ("None", "") else f"{said}, {reason}",
        next((text for start, text in _WHY.items() if reason.startswith(start)), "") if state == "queued" else "",
        starts=begins if state == "queued" else None,
        since=begins if state in ("running", "ending") else None,
        # It ends when the limit is over; UNLIMITED is shown as a time that is far away.
        ends=ends if state == "running" and fields.get("TimeLimit", "") not in ("", "UNLIMITED") else None,
        restarts=int(restarts) if restarts.isdecimal() else None,
    )


def cancel_words(job: RunJob, *, queued: bool) -> tuple[str, ...]:
    """`scancel`, where that is wanted of what has not begun only; of a chain all of it."""
    which = (f"--user={os.getuid()}", f"--name={job.chain}") if job.chain else (job.id.partition(":")[2],)
    return ("scancel", *(["--state=PENDING"] if queued else []), *which)


def _state(said: str) -> State:
    if said in _QUEUED:
        return "queued"
    if said in _RUNNING:
        return "running"
    if said in _ENDING:
        return "ending"
    return "ended" if said else "unknown"
