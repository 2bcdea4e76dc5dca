"""The requeuer `command`: what the job's scheduler has for it, or a command of the user's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from fairlead.errors import RunFailedError
from fairlead.findings import Finding
from fairlead.hookspecs import hookimpl
from fairlead.interfaces import Requeuer
from fairlead.plugin_classes import RequeuePlugin
from fairlead_hpc_signals.programs import (
    COMMAND_MISSING,
    JOB_UNKNOWN,
    CommandSettings,
    check_command,
    check_job,
    requeue_command,
    run_command,
)

if TYPE_CHECKING:
    from fairlead.resolve import Resolution


class CommandRequeueConfig(CommandSettings):
    """Runs a command on rank 0 that requeues the job, for schedulers without a requeuer."""

    name: Literal["command"] = "command"
    argv: tuple[str, ...] | None = Field(default=None, min_length=1, strict=False)
    """The program and its arguments, as a list of words. Default null: the command that the environment of the job's
    scheduler names. There is no shell: `$JOB` stays `$JOB`, and the program reads the job's environment itself. It must
    exit with 0 if the job will restart."""


class Command(RequeuePlugin):
    """Any scheduler that has a command for it."""

    config = CommandRequeueConfig
    runtime = "fairlead_hpc_signals.command:build"
    extra = "lightning"
    example: ClassVar[Mapping[str, Any]] = {"retry_wait_s": 0.0}
    example_environ: ClassVar[Mapping[str, str]] = {
        "SLURM_JOB_ID": "7",
    }
    codes: ClassVar[Mapping[str, str]] = {**COMMAND_MISSING, **JOB_UNKNOWN}

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterable[Finding]:
        """Is there something to run, and is the program there?"""
        config = resolution.requeue
        assert isinstance(config, CommandRequeueConfig)  # it is called for the selected plugin
        if config.argv is None:
            yield from check_job(resolution)
        if argv := config.argv or requeue_command(resolution.job):
            yield from check_command(argv[0], resolution, environ)


class CommandRequeuer(Requeuer):
    """Runs the command on one rank, when everything is saved."""

    config: CommandRequeueConfig

    def requeue(self) -> str:
        """Runs the command; returns it."""
        argv = self.config.argv or requeue_command(self.job)
        if not argv:
            raise RunFailedError(
                "the job is not requeued: there is no command to run",
                where="trainer.requeue.argv",
                why="no installed environment names one for this process",
                fix="set `requeue: {name: command, argv: [...]}`",
            )
        return run_command(
            argv,
            self.config,
            self.environ,
            missing="give the full path of the program in `requeue: {name: command, argv: [...]}`",
        )


build = CommandRequeuer.build
command = Command()
