"""Has LSF start the job again."""

from __future__ import annotations

from collections.abc import Mapping

from fairlead.errors import RunFailedError
from fairlead.interfaces import BuildContext
from fairlead_hpc_signals.commands import run_command
from fairlead_hpc_signals.jobs import lsf_job
from fairlead_hpc_signals.lsf.config import LSFRequeueConfig

__all__ = ["LSFRequeuer", "build"]

_REFUSALS = {
    "No matching job found": "submit the job again; LSF no longer knows it",
    "User permission denied": "submit the job again, or try `requeue: script`",
}


def build(config: LSFRequeueConfig, context: BuildContext) -> LSFRequeuer:
    """The runtime of the requeuer `lsf`."""
    return LSFRequeuer(config, context.environ)


class LSFRequeuer:
    """`brequeue`; call it on one rank, when everything is saved."""

    def __init__(self, config: LSFRequeueConfig, environ: Mapping[str, str]) -> None:
        self._config = config
        self._environ = environ

    def requeue(self) -> str:
        """Requeues this job; returns the command that did.

        Raises:
            RunFailedError: There is no job or no `brequeue`, LSF refused, or it did not answer.
        """
        job = lsf_job(self._environ)
        if job is None:
            raise RunFailedError(
                "the job is not requeued: this process belongs to no LSF job",
                why="LSB_JOBID is not set",
                fix="start it with bsub, or choose another `requeue`",
            )
        return run_command(
            job.command,
            self._config,
            self._environ,
            missing="set `requeue: script` and let the job script run what it writes: that is outside the container",
            refusals=_REFUSALS,
        )
