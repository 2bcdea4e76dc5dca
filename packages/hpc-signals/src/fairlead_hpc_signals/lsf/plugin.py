"""What the requeuer `lsf` contributes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from fairlead.axes import RequeuePlugin
from fairlead.findings import Finding
from fairlead.hookspecs import hookimpl
from fairlead_hpc_signals.checks import COMMAND_MISSING, JOB_UNKNOWN, check_command, check_job
from fairlead_hpc_signals.jobs import lsf_job
from fairlead_hpc_signals.lsf.config import LSFRequeueConfig

if TYPE_CHECKING:
    from fairlead.resolve import Resolution

__all__ = ["LSF", "lsf"]


class LSF(RequeuePlugin):
    """Asks LSF."""

    config = LSFRequeueConfig
    runtime = "fairlead_hpc_signals.lsf.runtime:build"
    extra = "lsf"
    codes: ClassVar[Mapping[str, str]] = {**COMMAND_MISSING, **JOB_UNKNOWN}

    def evidence(self, environ: Mapping[str, str]) -> str | None:
        """Any process of a job."""
        job = lsf_job(environ)
        return f"LSB_JOBID={job.id}" if job is not None else None

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterable[Finding]:
        """Is there a job, and the command?"""
        yield from check_job(lsf_job(environ), "LSF", "LSB_JOBID is not set", resolution)
        yield from check_command("brequeue", resolution, environ)


lsf = LSF()
