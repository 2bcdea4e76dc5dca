"""Why a signal came: told by the scheduler, as the signal itself does not say.

The same SIGTERM comes at the time limit, before a preemption, from `scancel` and when a node fails. So one rank asks
(thousands that do would bring the scheduler down), with a deadline. Without an answer the reason is `unknown`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["ASK_TIMEOUT", "LIMIT_WINDOW", "StopReason", "Why", "why_stopped"]

Why = Literal["preempted", "time_limit", "cancelled", "node_failure", "requeued", "unknown"]
"""`preempted`: another job gets the nodes; `time_limit`: the job's time is up, or nearly; `cancelled`: a person ended
it; `node_failure`: a node of the job failed; `requeued`: somebody has requeued it already; `unknown`: the scheduler
did not say, as after `scancel -s USR1`."""

ASK_TIMEOUT: Final = 10.0
"""Seconds that the scheduler may take to answer."""
LIMIT_WINDOW: Final = 600.0
"""Seconds before its end in which a running job that was signalled is taken to be near its time limit."""


@dataclass(frozen=True, slots=True)
class StopReason:
    """Why this job is to stop.

    Args:
        why: The reason.
        evidence: What it was read from, for the history.
        remaining_s: Seconds until the scheduler ends the job; None where that is not known.
        scheduler_requeues: The job is requeued already: nobody else may.
        may_requeue: Whether the scheduler lets the job be requeued; None where that is not known.

    Example:
        >>> StopReason("preempted", "PreemptTime=2026-11-21T16:25:09", remaining_s=4.0).why
        'preempted'
    """

    why: Why
    evidence: str
    remaining_s: float | None = None
    scheduler_requeues: bool = False
    may_requeue: bool | None = None


def why_stopped(
    environ: Mapping[str, str], *, timeout_s: float = ASK_TIMEOUT, limit_window_s: float = LIMIT_WINDOW
) -> StopReason:
    """Asks the scheduler of this job why it is to stop; on one rank only.

    Args:
        environ: The environment of the job: names it, and finds the scheduler's commands.
        timeout_s: Seconds for the whole answer.
        limit_window_s: See `LIMIT_WINDOW`; longer where jobs are warned earlier, as by `--signal=USR1@1800`.

    Example:
        >>> why_stopped({}).why
        'unknown'
    """
    from fairlead_hpc_signals.jobs import current_job
    from fairlead_hpc_signals.lsf_reasons import ask_lsf
    from fairlead_hpc_signals.slurm_reasons import ask_slurm

    job = current_job(environ)
    if job is None:
        return StopReason("unknown", "this process belongs to no SLURM or LSF job")
    ask = ask_slurm if job.scheduler == "SLURM" else ask_lsf
    return ask(job.id, environ, time.monotonic() + timeout_s, limit_window_s)
