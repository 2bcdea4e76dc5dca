"""What the scheduler of this process says and does, for a loop without a config."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from fairlead.interfaces import Requeuer
from fairlead_hpc_signals.jobs import lsf_job, slurm_job
from fairlead_hpc_signals.lsf import LSFRequeueConfig, LSFRequeuer, ask_lsf, lsf
from fairlead_hpc_signals.outcomes import ASK_TIMEOUT, LIMIT_WINDOW, StopReason
from fairlead_hpc_signals.script import ScriptRequeueConfig, ScriptRequeuer, script
from fairlead_hpc_signals.slurm import SLURMRequeueConfig, SLURMRequeuer, slurm
from fairlead_hpc_signals.slurm_reasons import ask_slurm


def why_stopped(
    environ: Mapping[str, str], *, timeout_s: float = ASK_TIMEOUT, limit_window_s: float = LIMIT_WINDOW
) -> StopReason:
    """Asks the scheduler of this job why it is to stop; on one rank only.

    The signal itself does not say: the same SIGTERM comes at the time limit, before a preemption, from `scancel` and
    when a node fails. One rank asks, as thousands that do would bring the scheduler down.

    Args:
        environ: The environment of the job: names it, and finds the scheduler's commands.
        timeout_s: Seconds for the whole answer; without one the reason is `unknown`.
        limit_window_s: See `LIMIT_WINDOW`; longer where jobs are warned earlier, as by `--signal=USR1@1800`.
    """
    deadline = time.monotonic() + timeout_s
    if (job := slurm_job(environ)) is not None:
        return ask_slurm(job, environ, deadline, limit_window_s)
    if (job := lsf_job(environ)) is not None:
        return ask_lsf(job, environ, deadline, limit_window_s)
    return StopReason("unknown", "this process belongs to no SLURM or LSF job")


def requeuer_here(environ: Mapping[str, str] | None = None) -> Requeuer | None:
    """The requeuer that the variables of this process speak for, with its usual settings: as `requeue: auto`.

    None where no scheduler is seen: then the exit code 75 asks whoever started the job.
    """
    environ = os.environ if environ is None else environ
    if script.evidence(environ) is not None:  # whoever sets its variable runs what is written there, and nothing else
        return ScriptRequeuer(ScriptRequeueConfig(), environ)
    if slurm.evidence(environ) is not None:
        return SLURMRequeuer(SLURMRequeueConfig(), environ)
    if lsf.evidence(environ) is not None:
        return LSFRequeuer(LSFRequeueConfig(), environ)
    return None
