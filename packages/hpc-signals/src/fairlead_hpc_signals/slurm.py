"""The requeuer `slurm`: `scontrol requeue`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from fairlead.errors import RunFailedError
from fairlead.findings import Finding
from fairlead.hookspecs import hookimpl
from fairlead.plugin_classes import RequeuePlugin
from fairlead_hpc_signals.jobs import JOB_UNKNOWN, ConfiguredRequeuer, check_job, slurm_job
from fairlead_hpc_signals.programs import (
    COMMAND_MISSING,
    NOT_IN_CONTAINER,
    CommandSettings,
    check_command,
    run_command,
)
from fairlead_hpc_signals.slurm_reasons import ask_slurm

if TYPE_CHECKING:
    from fairlead.resolve import Resolution

_CHECK_TIMEOUT: Final = 5.0  # seconds that the start of a job may wait for an answer

_SUBMIT: Final = "submit the job again; with `sbatch --requeue` SLURM lets it be requeued"
# Messages of Slurm's own (slurm_errno.c); every other failure, such as a busy controller, is tried again.
_REFUSALS: Final[Mapping[str, str]] = {
    "Invalid job id": "submit the job again; SLURM no longer knows it",
    "Requested operation is presently disabled": _SUBMIT,
    "Access/permission denied": "submit the job again; on this cluster users may not requeue: try `requeue: script`",
}
# SLURM ends the job's processes as it requeues it, and sometimes the command itself before it has its answer.
_DONE: Final = ("Job is pending execution",)


class SLURMRequeueConfig(CommandSettings):
    """`scontrol requeue JOB` on rank 0; array tasks as `ARRAY_INDEX`. SLURM then ends this start of the job."""

    name: Literal["slurm"] = "slurm"


class SLURM(RequeuePlugin):
    """Asks SLURM."""

    config = SLURMRequeueConfig
    runtime = "fairlead_hpc_signals.slurm:build"
    extra = "slurm"
    codes: ClassVar[Mapping[str, str]] = {
        **COMMAND_MISSING,
        **JOB_UNKNOWN,
        "requeue-refused": "SLURM does not let this job be requeued: it was submitted so, or is no batch job.",
    }

    def evidence(self, environ: Mapping[str, str]) -> str | None:
        """Any process of a batch job; of an interactive one nothing is left that could be started again."""
        job = slurm_job(environ)
        return f"SLURM_JOB_ID={job}" if job is not None and "SLURM_PTY_PORT" not in environ else None

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterable[Finding]:
        """Is there a job, the command, and does SLURM allow it?"""
        job = slurm_job(environ)
        yield from check_job(job, "SLURM", "SLURM_JOB_ID is not set", resolution)
        yield from check_command("scontrol", resolution, environ)
        if resolution.inside_job and job is not None and resolution.value("global_rank") == 0:
            # Asked now: at the stop it would be too late. Without an answer nothing is said.
            deadline = time.monotonic() + _CHECK_TIMEOUT
            if ask_slurm(job, environ, deadline, limit_window_s=0.0).may_requeue is False:
                yield Finding(
                    "warning",
                    "requeue-refused",
                    f"SLURM will not requeue job {job}: a stop saves everything, but nothing starts it again",
                    where="trainer.requeue",
                    why="its Requeue is 0 (sbatch --no-requeue, or JobRequeue=0 in slurm.conf), or sbatch did not "
                    "start it",
                    fix="submit it with `sbatch --requeue`; or `requeue: none`, if it is not to start again",
                )


class SLURMRequeuer(ConfiguredRequeuer[SLURMRequeueConfig]):
    """`scontrol requeue`; call it on one rank, when everything is saved.

    SLURM then sends SIGCONT and SIGTERM to all processes of the job, the caller included, and SIGKILL after KillWait.
    """

    def requeue(self) -> str:
        """Requeues this job; returns the command that did."""
        job = slurm_job(self._environ)
        if job is None:
            raise RunFailedError(
                "the job is not requeued: this process belongs to no SLURM job",
                why="SLURM_JOB_ID is not set",
                fix="start it with sbatch or srun, or choose another `requeue`",
            )
        return run_command(
            ["scontrol", "requeue", job],
            self._config,
            self._environ,
            missing=NOT_IN_CONTAINER,
            refusals=_REFUSALS,
            done_before=_DONE,
        )


build = SLURMRequeuer.build
slurm = SLURM()
