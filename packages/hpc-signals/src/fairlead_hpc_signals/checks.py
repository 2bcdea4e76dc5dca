"""Findings that several requeuers make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from fairlead.findings import Finding, Severity
from fairlead_hpc_signals.commands import find_command
from fairlead_hpc_signals.jobs import Job

if TYPE_CHECKING:
    from fairlead.resolve import Resolution

__all__ = ["COMMAND_MISSING", "JOB_UNKNOWN", "check_command", "check_job"]

COMMAND_MISSING = {
    "requeue-command-missing": "The command that requeues the job is not on the PATH, as in many containers."
}
JOB_UNKNOWN = {"requeue-job-unknown": "The environment names no job that the requeuer could start again."}


def severity(resolution: Resolution) -> Severity:
    """Inside a job it will happen; on a login node the job's environment is not there yet."""
    return "warning" if resolution.inside_job else "info"


def check_job(job: Job | None, scheduler: str, evidence: str, resolution: Resolution) -> Iterator[Finding]:
    """Whether there is a job to requeue."""
    if job is None and resolution.inside_job:
        yield Finding(
            "warning",
            "requeue-job-unknown",
            f"this process belongs to no {scheduler} job, so that there is nothing to requeue",
            where="trainer.requeue",
            why=evidence,
            fix="requeue: none, exit_code, script or command",
        )


def check_command(name: str, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the command will be found."""
    if find_command(name, environ) is None:
        yield Finding(
            severity(resolution),
            "requeue-command-missing",
            f"{name} is not on the PATH; the job could not be requeued from here",
            where="trainer.requeue",
            why="containers often lack the scheduler's commands",
            fix="requeue: script, and let the job script run what it writes; or make the command available",
        )
