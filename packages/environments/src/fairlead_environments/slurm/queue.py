"""What SLURM says of a job: why it is to stop, and how it stands; seen with Slurm 22.05."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final, Literal

from fairlead import StopReason
from fairlead.facts import Why
from fairlead.hostlist import expand
from fairlead_runs.programs import ask
from fairlead_runs.scheduler import JobStatus

# -- why is it to stop?

# States that a job may be in while its processes still run. COMPLETING hides what it was ended for.
_STATES: Final[Mapping[str, Why]] = {
    "PREEMPTED": "preempted",
    "TIMEOUT": "time_limit",
    "DEADLINE": "time_limit",
    "NODE_FAIL": "node_failure",
    "BOOT_FAIL": "node_failure",
    "CANCELLED": "cancelled",
    "COMPLETING": "cancelled",
    "COMPLETED": "cancelled",
    "FAILED": "cancelled",
    "OUT_OF_MEMORY": "cancelled",
}
_FINAL: Final = _STATES.keys() - {"COMPLETING"}
_REASONS: Final[Mapping[str, Why]] = {"TimeLimit": "time_limit", "NodeDown": "node_failure", "Preempted": "preempted"}
_AGAIN: Final = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
_KILL_WAIT: Final = 30.0  # Slurm's own default
_CONFIG_S: Final = 2.0  # seconds for the second question, to a controller that has answered the first


def ask_slurm(job: str, environ: Mapping[str, str], deadline: float) -> StopReason:
    """Why this job, `17` or `17_3`, is to stop; `deadline` is on the monotonic clock.

    Of a preempted job it does not matter whether its partition requeues: SLURM requeues only what is still there when
    the time of grace is over, and lets a job that has stopped before end as FAILED (seen with 22.05). `scontrol
    requeue` in that time has it restarted once, in a partition that cancels as well.
    """
    # Else the user's own form of times comes out.
    environ = {**environ, "SLURM_TIME_FORMAT": "standard"}
    answer, problem = ask(["scontrol", "show", "job", "-o", job], deadline, environ)
    if problem:
        end = environ.get("SLURM_JOB_END_TIME", "")  # of newer versions
        return StopReason("unknown", problem, max(0.0, int(end) - time.time()) if end.isdecimal() else None)
    fields = fields_of(answer)
    if "JobState" not in fields:
        return StopReason("unknown", f"scontrol printed nothing about job {job}")
    config, _ = ask(["scontrol", "show", "config"], min(deadline, time.monotonic() + _CONFIG_S), environ)
    kill_wait = re.search(r"^KillWait\s*=\s*(\d+)", config, re.MULTILINE)
    restarts = environ.get("SLURM_RESTART_COUNT", "")
    return read_job(
        fields,
        int(restarts) if restarts.isdigit() else 0,
        environ.get("SLURM_JOB_NODELIST", ""),
        time.time(),
        float(kill_wait[1]) if kill_wait else None,
    )


def ended(job: str, host: str, environ: Mapping[str, str]) -> str | None:
    """The final state of a job that had this host; None: it has none yet, will restart, or is not known here."""
    answer, _ = ask(["scontrol", "show", "job", "-o", job], time.monotonic() + _CONFIG_S, environ)
    fields = fields_of(answer)
    state = fields.get("JobState", "")
    try:
        hosts = {one.partition(".")[0] for one in expand(fields.get("NodeList", ""))}
    except ValueError:
        return None
    return state if state in _FINAL and host.partition(".")[0] in hosts else None


def fields_of(text: str) -> dict[str, str]:
    """The fields of a line of `scontrol show -o`; what a user can write comes after them, but for the job's name."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    line = re.sub(r"(?<=JobName=).*(?= UserId=\S+\(\d+\) GroupId=)", "", line)
    pairs = re.findall(r"([A-Za-z][\w/:.&-]*)=(.*?)(?=\s+[A-Za-z][\w/:.&-]*=|$)", line)
    fields: dict[str, str] = {}
    for name, value in pairs:
        fields.setdefault(name, value.strip())
    return fields


def read_job(
    fields: Mapping[str, str], restarts: int, nodes: str, now: float, kill_wait: float | None = None
) -> StopReason:
    """The reason in the fields of `scontrol show job -o`; `kill_wait` is the cluster's KillWait, where that is known.

    `restarts` and `nodes` are what this process was started with: SLURM_RESTART_COUNT (0 if unset), SLURM_JOB_NODELIST.
    """
    grace = _KILL_WAIT if kill_wait is None else kill_wait
    state, reason, preempted = fields["JobState"], fields.get("Reason", "None"), local_time(fields.get("PreemptTime"))
    # SLURM restarts a batch script; of what salloc or srun began, nothing is left that it could start.
    may = False if fields.get("BatchFlag") == "0" else {"0": False, "1": True}.get(fields.get("Requeue", ""))
    end = local_time(fields.get("EndTime"))
    shown = ("JobState", "Reason", "Restarts", "NodeList", "EndTime", "PreemptTime")
    evidence = ", ".join(f"{name}={fields[name]}" for name in shown if name in fields)

    def because(why: Why, remaining: float | None, requeues: bool = False) -> StopReason:
        return StopReason(why, evidence, None if remaining is None else max(0.0, remaining), requeues, may, kill_wait)

    count = fields.get("Restarts", "")
    if state in _AGAIN or (count.isdigit() and int(count) > restarts):
        # PreemptTime is gone by now. Of the nodes, those that failed are missing; the others still end our processes.
        lost = state == "COMPLETING" and fields.get("NodeList", nodes) != nodes != ""
        return because("node_failure" if lost else "requeued", grace, requeues=True)
    if state in _STATES:
        # A job that is cancelled while a preemption grants it time has an earlier PreemptTime.
        at_once = preempted is not None and end is not None and end - preempted <= 1
        why: Why = _REASONS.get(reason) or ("preempted" if at_once else _STATES[state])
        return because(why, grace if end is None else end + grace - now)
    left = None if end is None else end - now
    if preempted:
        return because("preempted", left)
    return because("unknown", left)


def local_time(text: str | None) -> float | None:
    """Seconds since the epoch of a local time; None of `Unknown`, `None`, `N/A`."""
    try:
        return datetime.strptime(text or "", "%Y-%m-%dT%H:%M:%S").timestamp()
    except ValueError:
        return None


# -- how does it stand?

State = Literal["queued", "running", "ending", "ended", "unknown"]

_LISTED: Final[Mapping[str, str]] = {
    "%A": "JobId",
    "%i": "ArrayJobId",
    "%T": "JobState",
    "%r": "Reason",
    "%S": "StartTime",
    "%e": "EndTime",
    "%l": "TimeLimit",
}
"""What `squeue` prints, by the name that `scontrol` has for it."""
_QUEUED: Final = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_RUNNING: Final = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT")
_ENDING: Final = ("COMPLETING",)
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


def ask_for(job: str, environ: Mapping[str, str], deadline: float) -> JobStatus:
    """The status of a job; `deadline` is on the monotonic clock."""
    environ = {**environ, "SLURM_TIME_FORMAT": "standard"}
    number = job.partition(":")[2]
    answer, problem = ask(["scontrol", "show", "job", "-o", number], deadline, environ)
    if "Invalid job id" in problem:
        return _forgotten(job)
    if problem:
        return JobStatus("unknown", problem)
    lines = answer.splitlines()
    # The number of an array's last task is that of the array, and all tasks are shown.
    line = next((one for one in lines if re.match(rf"JobId={re.escape(number)}\b", one)), "".join(lines[:1]))
    return read_status(fields_of(line))


def ask_for_all(jobs: Sequence[str], environ: Mapping[str, str], deadline: float) -> dict[str, JobStatus]:
    """The status of many jobs, by one `squeue`: one question to the controller, though it may send all its jobs."""
    own = {name: value for name, value in environ.items() if not name.startswith("SQUEUE_")}  # would leave jobs out
    environ = {**own, "SLURM_TIME_FORMAT": "standard"}
    numbers = ",".join(job.partition(":")[2] for job in jobs)
    squeue = ["squeue", "--noheader", "--array", "--states=all", f"--format={'|'.join(_LISTED)}", f"--jobs={numbers}"]
    answer, problem = ask(squeue, deadline, environ)
    if problem and "Invalid job id" not in problem:
        return {job: JobStatus("unknown", problem) for job in jobs}
    found: dict[str, JobStatus] = {}
    for line in answer.splitlines():
        values = line.split("|")
        if len(values) == len(_LISTED):
            fields = dict(zip(_LISTED.values(), values, strict=True))
            # A job of an array has a number of its own, and that of the array with its index.
            found[fields["JobId"]] = found[fields["ArrayJobId"]] = read_status(fields)
    return {job: found.get(job.partition(":")[2]) or _forgotten(job) for job in jobs}


def _forgotten(job: str) -> JobStatus:
    return JobStatus("unknown", f"SLURM knows no job {job.partition(':')[2]} any more")


def read_status(fields: Mapping[str, str]) -> JobStatus:
    """The status in the fields of a line of `scontrol show job -o`; fields that a version lacks are not known."""
    job_state, reason = fields.get("JobState", ""), fields.get("Reason", "None")
    state = _state(job_state)
    if state == "unknown":
        return JobStatus(state, job_state or "scontrol printed nothing about the job")
    restarts = fields.get("Restarts", "")
    begins, ends = local_time(fields.get("StartTime")), local_time(fields.get("EndTime"))
    return JobStatus(
        state,
        job_state if reason in ("None", "") else f"{job_state}, {reason}",
        next((text for start, text in _WHY.items() if reason.startswith(start)), "") if state == "queued" else "",
        starts=begins if state == "queued" else None,
        since=begins if state in ("running", "ending") else None,
        # It ends when the limit is over; UNLIMITED is shown as a time that is far away.
        ends=ends if state == "running" and fields.get("TimeLimit", "") not in ("", "UNLIMITED") else None,
        restarts=int(restarts) if restarts.isdecimal() else None,
    )


def cancel_words(job: str, *, queued: bool) -> tuple[str, ...]:
    """`scancel`; `queued`: only if the job has not begun."""
    return ("scancel", *(["--state=PENDING"] if queued else []), job.partition(":")[2])


def _state(job_state: str) -> State:
    if job_state in _QUEUED:
        return "queued"
    if job_state in _RUNNING:
        return "running"
    if job_state in _ENDING:
        return "ending"
    return "ended" if job_state else "unknown"
