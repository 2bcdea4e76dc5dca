"""PBS in one file: who a rank is, why a job is to stop, how it is requeued, how the queue is asked. Never tried."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from fairlead import Claim, EnvironmentConfigBase, EnvironmentPlugin, Job, Setting, StopReason, Topology, hookimpl
from fairlead.errors import ConfigError
from fairlead_hpc_signals import CommandSettings, SchedulerRequeue
from fairlead_runs.programs import ask
from fairlead_runs.scheduler import JobQueue, JobStatus

State = Literal["queued", "running", "ending", "ended", "unknown"]
STATES: Mapping[str, State] = {
    **dict.fromkeys("QHWT", "queued"),  # held, waiting for its time, and in transition too
    **dict.fromkeys("RSUB", "running"),  # suspended, and an array that has begun, too
    "E": "ending",
    **dict.fromkeys("FX", "ended"),
}


# -- who am I?


class PBSEnvironmentConfig(EnvironmentConfigBase):
    """Ranks started by `pbsdsh`, one for each line of PBS_NODEFILE."""

    name: Literal["pbs"] = "pbs"
    """The tag."""
    main_port: int = Field(default=29500, ge=1024, le=65535)
    """The TCP port of the ranks' store on the first host."""


class PBS(EnvironmentPlugin, JobQueue):
    """A task of `pbsdsh`: PBS_NODEFILE lists a host for each rank, PBS_TASKNUM numbers them."""

    config = PBSEnvironmentConfig
    requeue = "pbs"
    # Of two nodes with two ranks each, this is the first rank of the second.
    example_environ: ClassVar[Mapping[str, str]] = {
        "PBS_JOBID": "17.server",
        "PBS_NODEFILE": str(Path(__file__).with_name("example.nodefile")),
        "PBS_VNODENUM": "2",
    }

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Claims a task, not a job: PBS_TASKNUM is set for the script as well, PBS_VNODENUM by pbsdsh only."""
        if "PBS_NODEFILE" in environ and "PBS_VNODENUM" in environ:
            return Claim(evidence="PBS_NODEFILE, PBS_VNODENUM")
        return None

    @hookimpl
    def fairlead_topology(self, config: PBSEnvironmentConfig, environ: Mapping[str, str]) -> Topology:
        """Counts hosts and ranks in the node file."""
        path = Path(environ.get("PBS_NODEFILE", ""))
        try:
            hosts = path.read_text().split()
            rank = int(environ["PBS_VNODENUM"])
            host = hosts[rank]
        except (OSError, KeyError, ValueError, IndexError) as error:
            raise ConfigError(
                "PBS does not say which rank this is",
                where="PBS_NODEFILE, PBS_VNODENUM",
                why=f"{type(error).__name__}: {error}",
                fix="start the ranks with pbsdsh inside a job",
            ) from error
        nodes = list(dict.fromkeys(hosts))
        return Topology(
            launched=True,
            num_nodes=Setting(len(nodes), "hosts in PBS_NODEFILE"),
            world_size=Setting(len(hosts), "lines in PBS_NODEFILE"),
            local_world_size=Setting(hosts.count(host), f"lines of {host} in PBS_NODEFILE"),
            global_rank=Setting(rank, "PBS_VNODENUM"),
            local_rank=Setting(hosts[:rank].count(host), f"lines of {host} before this one"),
            node_rank=Setting(nodes.index(host), f"the place of {host} in PBS_NODEFILE"),
            main_address=Setting(hosts[0], "the first host in PBS_NODEFILE"),
            main_port=Setting(config.main_port, "environment.main_port"),
        )

    @hookimpl
    def fairlead_job(self, environ: Mapping[str, str]) -> Job | None:
        """The job around this process: it names the runs of an array's tasks, and whoever holds a run's lock."""
        job = environ.get("PBS_JOBID")
        if not job:
            return None
        return Job(
            f"pbs:{job}",
            array_task=environ.get("PBS_ARRAY_INDEX"),
            cancel=f"qdel {job}",
            requeue=("qrerun", job),
            interactive=environ.get("PBS_ENVIRONMENT") == "PBS_INTERACTIVE",
            variables=("PBS_JOBID", "PBS_JOBNAME", "PBS_ARRAY_INDEX", "PBS_QUEUE"),
        )

    # -- why was I stopped?

    @hookimpl
    def fairlead_why(self, environ: Mapping[str, str], deadline: float) -> StopReason | None:
        """As `qstat` shows it; where it says no more than the time that is left, a short one is the time limit."""
        job = environ.get("PBS_JOBID")
        if not job:
            return None
        fields, problem = qstat(job, environ, deadline)
        if problem:
            return StopReason("unknown", problem)
        state, may = str(fields.get("job_state")), fields.get("Rerunable") == "True"
        evidence, end = f"qstat: job_state {state}", _end(fields)
        left = None if end is None else max(0.0, end - time.time())
        if STATES.get(state) == "queued":
            return StopReason("requeued", evidence, left, scheduler_requeues=True, may_requeue=may)
        return StopReason("unknown", evidence, left, may_requeue=may)

    # -- how is the queue asked?

    def job_status(self, job: str, environ: Mapping[str, str], deadline: float) -> JobStatus:
        """For `fairlead status`, `runs`, `logs -f` and `cancel`."""
        fields, problem = qstat(job.partition(":")[2], environ, deadline)
        if problem:
            return JobStatus("unknown", problem)
        state: State = STATES.get(str(fields.get("job_state")), "unknown")
        queued, running = state == "queued", state == "running"
        return JobStatus(
            state,
            f"job_state {fields.get('job_state')}",
            str(fields.get("comment", "")) if queued else "",
            since=_seconds(fields.get("stime")) if running else None,
            ends=_end(fields) if running else None,
        )

    def job_cancel(self, job: str, *, queued: bool) -> tuple[str, ...]:
        """`qdel`, which has no way to leave a job alone that has begun meanwhile."""
        return ("qdel", job.partition(":")[2])


def qstat(job: str, environ: Mapping[str, str], deadline: float) -> tuple[Mapping[str, Any], str]:
    """What `qstat` shows of a job, one that has ended too; with why it does not."""
    answer, problem = ask(["qstat", "-x", "-f", "-F", "json", job], deadline, environ)
    if problem:
        return {}, problem
    try:
        return json.loads(answer)["Jobs"][job], ""
    except (ValueError, KeyError, TypeError):
        return {}, f"qstat does not show job {job}"


def _end(fields: Mapping[str, Any]) -> float | None:
    """When the time limit is over, in seconds since the epoch."""
    limit, start = fields.get("Resource_List", {}).get("walltime"), _seconds(fields.get("stime"))
    if limit is None or start is None:
        return None
    hours, minutes, seconds = map(int, str(limit).split(":"))
    return start + hours * 3600 + minutes * 60 + seconds


def _seconds(text: object) -> float | None:
    """Of `Fri Nov 27 13:00:00 2026`."""
    return None if text is None else datetime.strptime(str(text), "%a %b %d %H:%M:%S %Y").timestamp()


# -- how is the job requeued?


class PBSRequeueConfig(CommandSettings):
    """`qrerun JOB` on rank 0. PBS then ends this start of the job."""

    name: Literal["pbs"] = "pbs"
    """The tag."""


class PBSRequeue(SchedulerRequeue):
    """Asks PBS by the command of `fairlead_job`."""

    config = PBSRequeueConfig
    program = "qrerun"
    start = "qsub"
    refusals: ClassVar[Mapping[str, str]] = {
        "Unauthorized Request": "on this cluster only operators may rerun jobs: "
        "`requeue: {name: command, argv: [qsub, job.sh]}` submits it again",
        "Job is not rerunnable": "submit it with `qsub -r y`",
        "Unknown Job Id": "submit the job again; PBS no longer knows it",
    }
    example_environ: ClassVar[Mapping[str, str]] = {"PBS_JOBID": "17.server"}


pbs = PBS()
requeue = PBSRequeue()
