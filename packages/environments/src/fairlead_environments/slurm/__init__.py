"""The environment `slurm`: tasks of a job step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, Literal

from fairlead import Claim, EnvironmentConfigBase, Specificity, StopReason, Topology, Unused, hookimpl
from fairlead.interfaces import Job
from fairlead.variables import number, text
from fairlead_environments.shared import LaunchedEnvironment, MainAddressConfig
from fairlead_environments.slurm.queue import ask_for, ask_for_all, ask_slurm, cancel_words, ended
from fairlead_environments.slurm.step import find_step, idle_allocation
from fairlead_environments.slurm.topology import topology
from fairlead_runs.scheduler import JobStatus, ListedQueue

RECORDED: Final = tuple(
    f"SLURM_{name}"
    for name in (
        *("JOB_ID", "JOBID", "JOB_NAME", "JOB_NODELIST", "JOB_NUM_NODES", "JOB_PARTITION", "JOB_QOS", "JOB_ACCOUNT"),
        *("ARRAY_JOB_ID", "ARRAY_TASK_ID", "RESTART_COUNT", "STEP_ID", "NTASKS", "NNODES", "NTASKS_PER_NODE"),
        *("TASKS_PER_NODE", "CPUS_PER_TASK", "GPUS_ON_NODE", "GPUS_PER_NODE", "GPUS_PER_TASK", "CLUSTER_NAME"),
        *("SUBMIT_DIR", "SUBMIT_HOST", "MEM_PER_NODE", "CPU_BIND", "CPU_BIND_TYPE"),
    )
)
"""The variables that a run's provenance keeps; SLURM_JWT and the like are secrets."""


class SLURMEnvironmentConfig(MainAddressConfig):
    """Tasks of a SLURM job step: started by `srun`, one task per rank.

    Detected in the tasks of `srun`, and not in a batch script, a shell or a notebook inside an allocation.
    `main_address` is the first node of the step; `main_port` is the first free one of 16 that are derived from job,
    step and restart count.

    Example:
        >>> SLURMEnvironmentConfig(auto_requeue=True).name
        'slurm'
    """

    name: Literal["slurm"] = "slurm"


class SLURM(LaunchedEnvironment, ListedQueue):
    """Tasks of a SLURM job step."""

    config = SLURMEnvironmentConfig
    aliases = ("SLURMEnvironmentPlugin",)
    extra = "slurm"
    requeue = "slurm"
    example_environ: ClassVar[Mapping[str, str]] = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "node[01-02]",
        "SLURM_JOB_NODELIST": "node[01-02]",
        "SLURMD_NODENAME": "node02",
    }

    @hookimpl
    def fairlead_detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Claims a task of a *step*, never a mere allocation: shells and notebooks live in allocations too."""
        evidence = find_step(environ)
        return None if evidence is None else Claim(evidence, Specificity.SCHEDULER)

    @hookimpl
    def fairlead_topology(self, config: EnvironmentConfigBase, environ: Mapping[str, str]) -> Topology:
        """From the variables of `srun`, the step's before the job's."""
        assert isinstance(config, SLURMEnvironmentConfig)
        return topology(config, environ)

    @hookimpl
    def fairlead_job(self, environ: Mapping[str, str]) -> Job | None:
        """The allocation around this process, a task of a step or not."""
        job = text(environ, "SLURM_JOB_ID", "SLURM_JOBID")
        if job is None:
            return None
        attempt, task = number(environ, "SLURM_RESTART_COUNT"), environ.get("SLURM_ARRAY_TASK_ID", "")
        return Job(
            f"slurm:{job.value}",
            attempt=attempt.value if attempt is not None else 0,  # unset until the first requeue
            array_task=task if task.isdecimal() else None,
            cancel=f"scancel {job.value}",
            requeue=("scontrol", "requeue", job_in_squeue(environ, job.value)),
            interactive="SLURM_PTY_PORT" in environ,
            cpus_per_rank=number(environ, "SLURM_CPUS_PER_TASK"),
            cpus_on_node=number(environ, "SLURM_CPUS_ON_NODE"),
            variables=RECORDED,
        )

    @hookimpl
    def fairlead_why(self, environ: Mapping[str, str], deadline: float) -> StopReason | None:
        """As `scontrol show job` tells it."""
        job = text(environ, "SLURM_JOB_ID", "SLURM_JOBID")
        return None if job is None else ask_slurm(job_in_squeue(environ, job.value), environ, deadline)

    @hookimpl
    def fairlead_over(self, environ: Mapping[str, str], job: str, host: str) -> str | None:
        """As `scontrol show job` tells it, for some minutes after the end."""
        scheduler, _, number = job.partition(":")
        return ended(number, host, environ) if scheduler == "slurm" else None

    def job_status(self, job: str, environ: Mapping[str, str], deadline: float) -> JobStatus:
        """From `scontrol show job`."""
        return ask_for(job, environ, deadline)

    def job_statuses(self, jobs: Sequence[str], environ: Mapping[str, str], deadline: float) -> Mapping[str, JobStatus]:
        """From one `squeue` for all."""
        return ask_for_all(jobs, environ, deadline)

    def job_cancel(self, job: str, *, queued: bool) -> tuple[str, ...]:
        """`scancel`."""
        return cancel_words(job, queued=queued)

    @hookimpl
    def fairlead_unused(self, environ: Mapping[str, str]) -> Unused | None:
        """An allocation of several nodes or tasks, around a process that is no task of a step."""
        return idle_allocation(environ)


def job_in_squeue(environ: Mapping[str, str], job: str) -> str:
    """This job as in `squeue`: an array task by array and index, `17_3`, a heterogeneous one by its first."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return environ.get("SLURM_JOB_ID_HET_GROUP_0") or job


slurm = SLURM()
