"""What the requeuers share: whether there is a job of a scheduler that they could start again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from fairlead.facts import Job
from fairlead.findings import Finding

if TYPE_CHECKING:
    from fairlead.resolve import Resolution

JOB_UNKNOWN: Final[Mapping[str, str]] = {
    "requeue-job-unknown": "The environment names no job that the requeuer could start again."
}
"""The code of `check_job`."""


def requeue_command(job: Job | None, scheduler: str | None = None) -> tuple[str, ...]:
    """The command that requeues a job, where it is one of the scheduler, if one is named; else nothing."""
    return job.requeue if job is not None and scheduler in (None, job.scheduler) else ()


def check_job(resolution: Resolution, scheduler: str | None = None) -> Iterator[Finding]:
    """Whether there is a job to requeue."""
    if resolution.inside_job and not requeue_command(resolution.job, scheduler):
        yield Finding(
            "warning",
            "requeue-job-unknown",
            f"this process belongs to no job {f'of {scheduler}' if scheduler else 'that can be requeued'}, "
            "so that there is nothing to requeue",
            where="trainer.requeue",
            why="no installed environment finds one" if resolution.job is None else f"it is in {resolution.job.id}",
            fix="requeue: none, exit_code, script or command",
        )
