"""What a user reads of a stop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["stop_summary"]

_BECAUSE: Final[Mapping[str, str]] = {
    "preempted": "as another job needs the nodes",
    "time_limit": "as the time limit is near",
    "cancelled": "as the job was cancelled",
    "node_failure": "as a node failed",
    "requeued": "as somebody has requeued the job",
}


def stop_summary(outcome: Any, step: int, saved: str) -> str:
    """Where the run stopped and why, what is saved, and who starts it again.

    Args:
        outcome: How the stop ended, the outcome of a `fairlead.interfaces.StopGuard`.
        step: The optimizer step at which it stopped.
        saved: What is saved, and where.
    """
    because = _BECAUSE.get(outcome.reason.why, "asked to stop")
    stopped = f"stopped at step {step}, {because}; {saved}"
    if outcome.error:
        return f"{stopped}. The job does not start again by itself:\n{outcome.error}"
    if outcome.refused:
        return f"{stopped}. The job is not started again: {outcome.refused}"
    if outcome.reason.scheduler_requeues:
        return f"{stopped}; the scheduler starts the job again by itself"
    if outcome.requeued:
        return f"{stopped}; the job starts again ({outcome.requeued})"
    if outcome.start_wanted:
        return f"{stopped}; exit code {outcome.exit_code} asks for another start"
    return f"{stopped}; the same command resumes from there"
