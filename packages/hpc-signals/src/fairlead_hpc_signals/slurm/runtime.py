"""Has SLURM start the job again."""

from __future__ import annotations

from collections.abc import Mapping

from fairlead.errors import RunFailedError
from fairlead.interfaces import BuildContext
from fairlead_hpc_signals.commands import run_command
from fairlead_hpc_signals.jobs import slurm_job
from fairlead_hpc_signals.slurm.config import SLURMRequeueConfig

__all__ = ["SLURMRequeuer", "build"]

_SUBMIT = "submit the job again; with `sbatch --requeue` SLURM lets it be requeued"
# Messages of Slurm's own (slurm_errno.c); every other failure, such as a busy controller, is tried again.
_REFUSALS = {
    "Invalid job id": "submit the job again; SLURM no longer knows it",
    "Requested operation is presently disabled": _SUBMIT,
    "Access/permission denied": "submit the job again; on this cluster users may not requeue: try `requeue: script`",
}

# SLURM ends the job's processes as it requeues it, and sometimes the command itself before it has its answer.
_DONE = ("Job is pending execution",)


def build(config: SLURMRequeueConfig, context: BuildContext) -> SLURMRequeuer:
    """The runtime of the requeuer `slurm`."""
    return SLURMRequeuer(config, context.environ)


class SLURMRequeuer:
    """`scontrol requeue`; call it on one rank, when everything is saved.

    SLURM sends SIGCONT and SIGTERM to all processes of the job at once, the caller included, and
    SIGKILL after KillWait.
    """

    def __init__(self, config: SLURMRequeueConfig, environ: Mapping[str, str]) -> None:
        self._config = config
        self._environ = environ

    def requeue(self) -> str:
        """Requeues this job; returns the command that did.

        Raises:
            RunFailedError: There is no job or no `scontrol`, SLURM refused, or it did not answer.
        """
        job = slurm_job(self._environ)
        if job is None:
            raise RunFailedError(
                "the job is not requeued: this process belongs to no SLURM job",
                why="SLURM_JOB_ID is not set",
                fix="start it with sbatch or srun, or choose another `requeue`",
            )
        return run_command(
            job.command,
            self._config,
            self._environ,
            missing="set `requeue: script` and let the job script run what it writes: that is outside the container",
            refusals=_REFUSALS,
            done_before=_DONE,
        )
