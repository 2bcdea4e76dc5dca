"""What the requeuer `slurm` contributes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Final

from fairlead.axes import RequeuePlugin
from fairlead.findings import Finding
from fairlead.hookspecs import hookimpl
from fairlead_hpc_signals.checks import COMMAND_MISSING, JOB_UNKNOWN, check_command, check_job
from fairlead_hpc_signals.jobs import slurm_job
from fairlead_hpc_signals.slurm.config import SLURMRequeueConfig
from fairlead_hpc_signals.slurm_reasons import ask_slurm

if TYPE_CHECKING:
    from fairlead.resolve import Resolution

__all__ = ["SLURM", "check_allowed", "slurm"]

_PATIENCE: Final = 5.0  # seconds that the start of a job may wait for an answer


class SLURM(RequeuePlugin):
    """Asks SLURM."""

    config = SLURMRequeueConfig
    runtime = "fairlead_hpc_signals.slurm.runtime:build"
    extra = "slurm"
    codes: ClassVar[Mapping[str, str]] = {
        **COMMAND_MISSING,
        **JOB_UNKNOWN,
        "requeue-refused": "SLURM does not let this job be requeued: it was submitted so, or is no batch job.",
    }

    def evidence(self, environ: Mapping[str, str]) -> str | None:
        """Any process of a batch job; of an interactive one nothing is left that could be started again."""
        job = slurm_job(environ)
        return f"SLURM_JOB_ID={job.id}" if job is not None and "SLURM_PTY_PORT" not in environ else None

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterable[Finding]:
        """Is there a job, and the command?"""
        yield from check_job(slurm_job(environ), "SLURM", "SLURM_JOB_ID is not set", resolution)
        yield from check_command("scontrol", resolution, environ)
        if resolution.inside_job and slurm_job(environ) is not None and resolution.value("global_rank") == 0:
            yield from check_allowed(environ)


def check_allowed(environ: Mapping[str, str]) -> Iterable[Finding]:
    """Asks SLURM now: at the stop it would be too late. Without an answer nothing is said."""
    job = slurm_job(environ)
    assert job is not None
    reason = ask_slurm(job.id, environ, time.monotonic() + _PATIENCE, limit_window_s=0.0)
    if reason.may_requeue is False:
        yield Finding(
            "warning",
            "requeue-refused",
            f"SLURM will not requeue job {job.id}: a stop saves everything, but nothing starts it again",
            where="trainer.requeue",
            why="its Requeue is 0 (sbatch --no-requeue, or JobRequeue=0 in slurm.conf), or sbatch did not start it",
            fix="submit it with `sbatch --requeue`; or `requeue: none`, if it is not to start again",
        )


slurm = SLURM()
