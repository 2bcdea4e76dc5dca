"""The requeuer of a scheduler: its environment names the command, and this runs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from fairlead.config_bases import RequeueConfigBase
from fairlead.errors import RunFailedError
from fairlead.facts import Job
from fairlead.findings import Finding
from fairlead.hookspecs import hookimpl
from fairlead.interfaces import BuildContext, Requeuer
from fairlead.plugin_classes import RequeuePlugin
from fairlead_hpc_signals.programs import (
    COMMAND_MISSING,
    JOB_UNKNOWN,
    NOT_IN_CONTAINER,
    CommandSettings,
    check_command,
    check_job,
    requeue_command,
    run_command,
)

if TYPE_CHECKING:
    from fairlead.resolve import Resolution


class SchedulerRequeue(RequeuePlugin):
    """Has a scheduler restart its job, by the `requeue` command of the `Job` that its environment finds.

    The tag is that of the scheduler, as `Job.id` begins with it and the environment's `requeue` names it.
    """

    runtime = "fairlead_hpc_signals.scheduler_requeue:build"
    program: ClassVar[str]
    """The command's first word, which has to be on the PATH of rank 0."""
    start: ClassVar[str]
    """What starts a job of this scheduler, for a process that is in none."""
    refusals: ClassVar[Mapping[str, str]] = {}
    """Words of its answers after which there is no retry, each with what to do."""
    done_before: ClassVar[Sequence[str]] = ()
    """Words of its answers which say that the job is requeued already: an attempt may have been ended with the job."""
    example: ClassVar[Mapping[str, Any]] = {"retry_wait_s": 0.0}
    codes: ClassVar[Mapping[str, str]] = {**COMMAND_MISSING, **JOB_UNKNOWN}

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterable[Finding]:
        """Is there a job, and the command?"""
        yield from check_job(resolution, self.tag)
        yield from check_command(self.program, resolution, environ)


class SchedulerRequeuer(Requeuer):
    """Runs the command; call it on one rank, when everything is saved.

    Args:
        config: How patiently.
        environ: The environment variables of the process.
        job: The job as its environment knows it; None outside of one.
        scheduler: What the command is and what its answers mean.
    """

    config: CommandSettings

    def __init__(
        self, config: RequeueConfigBase, environ: Mapping[str, str], job: Job | None, scheduler: SchedulerRequeue
    ) -> None:
        super().__init__(config, environ, job)
        self.scheduler = scheduler

    @classmethod
    def build(cls, config: RequeueConfigBase, context: BuildContext) -> Self:
        """The runtime of the plugin."""
        scheduler = context.plugins.of(config)
        assert isinstance(scheduler, SchedulerRequeue)  # it names this as its runtime
        return cls(config, context.environ, context.resolution.job, scheduler)

    def requeue(self) -> str:
        """Requeues this job; returns the command that did."""
        return self.run(self.command(), refusals=self.scheduler.refusals, done_before=self.scheduler.done_before)

    def command(self) -> tuple[str, ...]:
        """The command that requeues this job, whose last word is the job; RunFailedError outside of one."""
        words = requeue_command(self.job, self.scheduler.tag)
        if not words:
            raise RunFailedError(
                f"the job is not requeued: this process belongs to no job of {self.scheduler.tag}",
                fix=f"start it with {self.scheduler.start}, or choose another `requeue`",
            )
        return words

    def run(self, words: Sequence[str], **answers: Any) -> str:
        """Runs a command of the scheduler as `run_command` does."""
        return run_command(words, self.config, self.environ, missing=NOT_IN_CONTAINER, **answers)


build = SchedulerRequeuer.build
