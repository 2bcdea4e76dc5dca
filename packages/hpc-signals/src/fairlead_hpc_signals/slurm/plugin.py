"""What the requeuer `slurm` contributes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from fairlead.axes import RequeuePlugin
from fairlead.findings import Finding
from fairlead.hookspecs import hookimpl
from fairlead_hpc_signals.checks import COMMAND_MISSING, JOB_UNKNOWN, check_command, check_job
from fairlead_hpc_signals.jobs import slurm_job
from fairlead_hpc_signals.slurm.config import SLURMRequeueConfig

if TYPE_CHECKING:
    from fairlead.resolve import Resolution

__all__ = ["SLURM", "slurm"]


class SLURM(RequeuePlugin):
    """Asks SLURM."""

    config = SLURMRequeueConfig
    runtime = "fairlead_hpc_signals.slurm.runtime:build"
    extra = "slurm"
    codes: ClassVar[Mapping[str, str]] = {**COMMAND_MISSING, **JOB_UNKNOWN}

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterable[Finding]:
        """Is there a job, and the command?"""
        yield from check_job(slurm_job(environ), "SLURM", "SLURM_JOB_ID is not set", resolution)
        yield from check_command("scontrol", resolution, environ)


slurm = SLURM()
