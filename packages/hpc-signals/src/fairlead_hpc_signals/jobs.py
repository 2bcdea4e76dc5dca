"""What the requeuers share: how they are built, and which job of a scheduler this process belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, Generic, Self, TypeVar

from fairlead.config_bases import RequeueConfigBase
from fairlead.findings import Finding
from fairlead.interfaces import BuildContext

if TYPE_CHECKING:
    from fairlead.resolve import Resolution

C = TypeVar("C", bound=RequeueConfigBase)
JOB_UNKNOWN: Final[Mapping[str, str]] = {
    "requeue-job-unknown": "The environment names no job that the requeuer could start again."
}
"""The code of `check_job`."""


class ConfiguredRequeuer(Generic[C]):
    """What a requeuer is made of; its `requeue` is called on one rank, when everything is saved."""

    def __init__(self, config: C, environ: Mapping[str, str]) -> None:
        self._config = config
        self._environ = environ

    @classmethod
    def build(cls, config: C, context: BuildContext) -> Self:
        """The runtime of the plugin."""
        return cls(config, context.environ)


def slurm_job(environ: Mapping[str, str]) -> str | None:
    """This SLURM job: an array task by array and index, `17_3`, as in `squeue`, a heterogeneous one by its first."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    variables = ("SLURM_JOB_ID_HET_GROUP_0", "SLURM_JOB_ID", "SLURM_JOBID")
    return next((environ[variable] for variable in variables if environ.get(variable)), None)


def lsf_job(environ: Mapping[str, str]) -> str | None:
    """This LSF job, `17` or `17[3]`; LSB_JOBINDEX is 0 for a job that is no array element."""
    name, index = environ.get("LSB_JOBID"), environ.get("LSB_JOBINDEX", "0")
    return f"{name}[{index}]" if name and index not in ("", "0") else name or None


def check_job(job: str | None, scheduler: str, evidence: str, resolution: Resolution) -> Iterator[Finding]:
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
