"""Which job this process belongs to, and the command that has it started again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fairlead.findings import Finding

if TYPE_CHECKING:
    from fairlead.resolve import Resolution

__all__ = ["JOB_UNKNOWN", "Job", "check_job", "current_job", "lsf_job", "slurm_job"]

JOB_UNKNOWN: Final[Mapping[str, str]] = {
    "requeue-job-unknown": "The environment names no job that the requeuer could start again."
}
"""The code of `check_job`."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job of a scheduler.

    Args:
        scheduler: `SLURM` or `LSF`.
        id: As the scheduler's commands take it: `17`, `17_3`, `17[3]`.
        command: The command that requeues it.
    """

    scheduler: str
    id: str
    command: tuple[str, ...]

    @property
    def file_name(self) -> str:
        """The id in letters that need no quotes: `17_3`."""
        return self.id.replace("[", "_").replace("]", "")


def slurm_job(environ: Mapping[str, str]) -> Job | None:
    """This SLURM job; an array task by array and index, a heterogeneous job by its first component.

    The job id alone would do for an array task as well, but the pair is what `squeue` and people use.
    """
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        name = f"{array}_{task}"
    else:
        variables = ("SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_ID", "SLURM_JOBID")
        name = next((environ[variable] for variable in variables if environ.get(variable)), "")
    return Job("SLURM", name, ("scontrol", "requeue", name)) if name else None


def lsf_job(environ: Mapping[str, str]) -> Job | None:
    """This LSF job; LSB_JOBINDEX is 0 for a job that is no array element."""
    name, index = environ.get("LSB_JOBID", ""), environ.get("LSB_JOBINDEX", "0")
    if not name:
        return None
    if index not in ("", "0"):
        name = f"{name}[{index}]"
    return Job("LSF", name, ("brequeue", name))


def current_job(environ: Mapping[str, str]) -> Job | None:
    """The job of whichever scheduler it is."""
    return slurm_job(environ) or lsf_job(environ)


def check_job(job: Job | None, scheduler: str, evidence: str, resolution: Resolution) -> Iterator[Finding]:
    """Whether there is a job to requeue."""
    if job is None and resolution.inside_job:
        yield Finding(
            "warning",
            "requeue-job-unknown",
            f"this process belongs to no {scheduler} job, so that there is nothing to requeue",
            where="trainer.requeue",
            why=evidence,
            fix="requeue: none, exit_code, script or command",
        )
