"""Runs the command that requeues a job: retried after a failure, with the reason when it fails."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from pydantic import Field

from fairlead.config_bases import RequeueConfigBase
from fairlead.errors import RunFailedError
from fairlead.facts import Job
from fairlead.findings import Finding
from fairlead_runs.programs import Attempt, attempt, find

if TYPE_CHECKING:
    from fairlead.resolve import Resolution


COMMAND_MISSING: Final[Mapping[str, str]] = {
    "requeue-command-missing": "The command that requeues the job is not on the PATH, as in many containers."
}
"""The code of `check_command`."""
NOT_IN_CONTAINER: Final = (
    "set `requeue: script` and let the job script run what it writes: that is outside the container"
)
"""What to do where a scheduler's command is not there."""


class CommandSettings(RequeueConfigBase):
    """The settings of the requeuers that run a command: how patiently."""

    timeout_s: float = Field(default=30.0, gt=0, strict=False)
    """Seconds after which one attempt is killed. Default 30: a scheduler that is busy answers within that, and a
    preempted job has seldom more than a minute left."""
    retries: int = Field(default=2, ge=0)
    """Further attempts after one that failed or took too long."""
    retry_wait_s: float = Field(default=2.0, ge=0, strict=False)
    """Seconds between two attempts."""


def check_command(name: str, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the command will be found."""
    if find(name, environ) is None:
        yield Finding(
            # Inside a job it will happen; on a login node the job's environment is not there yet.
            "warning" if resolution.inside_job else "info",
            "requeue-command-missing",
            f"{name} is not on the PATH; the job could not be requeued from here",
            where="trainer.requeue",
            why="containers often lack the scheduler's commands",
            fix="requeue: script, and let the job script run what it writes; or make the command available",
        )


class UnansweredError(RunFailedError):
    """No attempt of a command was answered in its time; the scheduler may answer later."""


def run_command(
    argv: Sequence[str],
    settings: CommandSettings,
    environ: Mapping[str, str],
    *,
    missing: str,
    refusals: Mapping[str, str] | None = None,
    done_before: Sequence[str] = (),
) -> str:
    """Runs a command until it succeeds, without a shell; what was run and its first line of output, for the history.

    `missing` is what to do when the program is not there. `refusals` are words in its output after which a retry
    is of no use, each with what to do; `done_before` words of a refusal that says that it is done: an attempt before
    may have been ended with the job. `RunFailedError`: it is not there, or no attempt succeeded.
    """
    shown = shlex.join(argv)
    program = find(argv[0], environ)
    if program is None:
        raise RunFailedError(
            f"the job is not requeued: {argv[0]} was not found",
            where=shown,
            why=f"PATH is {environ.get('PATH', os.defpath)}",
            fix=missing,
        )
    attempts: list[Attempt] = []
    for number in range(1 + settings.retries):
        if number:
            time.sleep(settings.retry_wait_s)
        done = attempt([program, *argv[1:]], settings.timeout_s, environ)
        attempts.append(done)
        if done.code == 0:
            head = done.message.splitlines()[0] if done.message else ""
            return f"{shown}: {head}" if head else shown
        if any(words in done.message for words in done_before):
            return f"{shown}: {done.message.splitlines()[0]}"
        fix = next((fix for words, fix in (refusals or {}).items() if words in done.message), None)
        if fix is not None:
            raise RunFailedError("the job is not requeued: it was refused", where=shown, why=done.message, fix=fix)
    kind = UnansweredError if all(one.code is None for one in attempts) else RunFailedError
    raise kind(
        f"the job is not requeued after {len(attempts)} attempt{'s' if len(attempts) > 1 else ''}",
        where=shown,
        why=_story(attempts, settings.timeout_s),
        fix="restart the job by hand; it resumes from its last checkpoint",
    )


def _story(attempts: Sequence[Attempt], timeout_s: float) -> str:
    lines = []
    for one in attempts:
        if one.code is None:
            lines.append(f"no answer within {timeout_s:g} s (it may have arrived all the same) {one.message}".strip())
        else:
            lines.append(f"exit code {one.code}: {one.message or 'no output'}")
    return "\n".join(dict.fromkeys(lines))


JOB_UNKNOWN: Final[Mapping[str, str]] = {
    "requeue-job-unknown": "The environment names no job that the requeuer could restart."
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
