"""The environment `lsf`: tasks of `jsrun` and `blaunch`."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from fairlead import Claim, EnvironmentConfigBase, StopReason, Topology, Unused, hookimpl
from fairlead.interfaces import Job
from fairlead.variables import number, text
from fairlead_environments.lsf.hosts import idle_job
from fairlead_environments.lsf.queue import ask_for, ask_lsf
from fairlead_environments.lsf.topology import find_task, topology
from fairlead_environments.shared import LaunchedEnvironment, MainAddressConfig
from fairlead_runs.scheduler import JobQueue, JobStatus

RECORDED: Final = (
    *("LSB_JOBID", "LSB_JOBINDEX", "LSB_JOBNAME", "LSB_QUEUE", "LSB_HOSTS", "LSB_MCPU_HOSTS", "LSB_DJOB_NUMPROC"),
    *("LSB_DJOB_RANKFILE", "LSB_AFFINITY_HOSTFILE"),
)
"""The variables that a run's provenance keeps."""


class LSFEnvironmentConfig(MainAddressConfig):
    """Tasks of an LSF job: started by `jsrun`, or by one `blaunch` over all slots of the job.

    A plain `bsub -n 4 python train.py` runs *one* process, on the first host, so it is not detected
    as LSF; `fairlead check` says so when the job has several hosts. `main_address` is the first
    host that runs tasks; `main_port` is the first free one of 16 that are derived from the job and array index.

    Example:
        >>> LSFEnvironmentConfig(auto_requeue=False).name
        'lsf'
    """

    name: Literal["lsf"] = "lsf"


class LSF(LaunchedEnvironment, JobQueue):
    """Tasks of an LSF job."""

    config = LSFEnvironmentConfig
    aliases = ("LSFEnvironmentPlugin",)
    extra = "lsf"
    requeue = "lsf"
    example_environ: ClassVar[Mapping[str, str]] = {
        "LSB_JOBID": "7",
        "LSB_HOSTS": "h1 h1 h2 h2",
        "LSF_PM_TASKID": "4",
    }

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Claims tasks of `jsrun` and `blaunch`; a plain `bsub` starts one process only."""
        return find_task(environ)

    @hookimpl
    def fairlead_topology(self, config: EnvironmentConfigBase, environ: Mapping[str, str]) -> Topology:
        """From JSM's or blaunch's variables and the job's hosts."""
        assert isinstance(config, LSFEnvironmentConfig)
        # The one thing about this task that LSF does not put into a variable.
        return topology(config, environ, socket.gethostname())

    @hookimpl
    def fairlead_job(self, environ: Mapping[str, str]) -> Job | None:
        """The job around this process; LSB_JOBINDEX is 0 outside of an array."""
        job, index = text(environ, "LSB_JOBID"), number(environ, "LSB_JOBINDEX")
        if job is None:
            return None
        task = str(index.value) if index is not None else None
        name = f"{job.value}[{task}]" if task is not None else job.value
        return Job(
            f"lsf:{name}",
            array_task=task,
            cancel=f"bkill {shlex.quote(name)}",
            requeue=("brequeue", name),
            variables=RECORDED,
        )

    @hookimpl
    def fairlead_why(self, environ: Mapping[str, str], deadline: float) -> StopReason | None:
        """As `bjobs` and `bhist` tell it."""
        job = self.fairlead_job(environ)
        return None if job is None else ask_lsf(job.requeue[-1], environ, deadline)

    def job_status(self, job: str, environ: Mapping[str, str], deadline: float) -> JobStatus:
        """As `bjobs` tells it."""
        return ask_for(job.partition(":")[2], environ, deadline)

    def job_cancel(self, job: str, *, queued: bool) -> tuple[str, ...]:
        """`bkill`, which has no way to leave a job alone that has begun meanwhile."""
        return ("bkill", job.partition(":")[2])

    @hookimpl
    def fairlead_unused(self, environ: Mapping[str, str]) -> Unused | None:
        """A job on several hosts, around one task that LSF itself started."""
        return idle_job(environ)


lsf = LSF()
