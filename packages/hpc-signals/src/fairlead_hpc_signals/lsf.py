"""The requeuer `lsf`: `brequeue`. Written from IBM's documentation; never tried."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from fairlead.findings import Finding
from fairlead.hookspecs import hookimpl
from fairlead.interfaces import Requeuer
from fairlead.plugin_classes import RequeuePlugin
from fairlead_hpc_signals.jobs import JOB_UNKNOWN, check_job, no_job, requeue_command
from fairlead_hpc_signals.programs import COMMAND_MISSING, NOT_IN_CONTAINER, CommandSettings, check_command, run_command

if TYPE_CHECKING:
    from fairlead.resolve import Resolution

_REFUSALS: Final[Mapping[str, str]] = {
    "No matching job found": "submit the job again; LSF no longer knows it",
    "User permission denied": "submit the job again, or try `requeue: script`",
}


class LSFRequeueConfig(CommandSettings):
    """`brequeue JOB` on rank 0; array elements as `JOB[INDEX]`. LSF then ends this start of the job."""

    name: Literal["lsf"] = "lsf"


class LSF(RequeuePlugin):
    """Asks LSF."""

    config = LSFRequeueConfig
    runtime = "fairlead_hpc_signals.lsf:build"
    extra = "lsf"
    example: ClassVar[Mapping[str, Any]] = {"retry_wait_s": 0.0}
    example_environ: ClassVar[Mapping[str, str]] = {
        "LSB_JOBID": "7",
    }
    codes: ClassVar[Mapping[str, str]] = {**COMMAND_MISSING, **JOB_UNKNOWN}

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterable[Finding]:
        """Is there a job, and the command?"""
        yield from check_job(resolution, "lsf")
        yield from check_command("brequeue", resolution, environ)


class LSFRequeuer(Requeuer):
    """`brequeue`; call it on one rank, when everything is saved."""

    config: LSFRequeueConfig

    def requeue(self) -> str:
        """Requeues this job; returns the command that did."""
        argv = requeue_command(self.job, "lsf")
        if not argv:
            raise no_job("lsf", "bsub")
        return run_command(argv, self.config, self.environ, missing=NOT_IN_CONTAINER, refusals=_REFUSALS)


build = LSFRequeuer.build
lsf = LSF()
