"""The requeuer `command`: a command of the user's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fairlead.findings import Finding
from fairlead.hookspecs import hookimpl
from fairlead.plugin_classes import RequeuePlugin
from fairlead_hpc_signals.jobs import ConfiguredRequeuer
from fairlead_hpc_signals.programs import COMMAND_MISSING, CommandSettings, check_command, run_command

if TYPE_CHECKING:
    from fairlead.resolve import Resolution


class CommandRequeueConfig(CommandSettings):
    """Runs a command of yours on rank 0, for schedulers that have no requeuer here."""

    name: Literal["command"] = "command"
    argv: tuple[str, ...] = Field(min_length=1, strict=False)
    """The program and its arguments, as a list of words. There is no shell: `$JOB` stays `$JOB`, and the program
    reads the job's environment itself. It must end with 0 when the job will start again."""


class Command(RequeuePlugin):
    """Any scheduler that has a command for it."""

    config = CommandRequeueConfig
    runtime = "fairlead_hpc_signals.command:build"
    extra = "lightning"
    codes: ClassVar[Mapping[str, str]] = COMMAND_MISSING

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterable[Finding]:
        """Is the program there?"""
        config = resolution.requeue
        assert isinstance(config, CommandRequeueConfig)  # it is called for the selected plugin
        yield from check_command(config.argv[0], resolution, environ)


class CommandRequeuer(ConfiguredRequeuer[CommandRequeueConfig]):
    """Runs the command on one rank, when everything is saved."""

    def requeue(self) -> str:
        """Runs the command; returns it."""
        return run_command(
            self._config.argv,
            self._config,
            self._environ,
            missing="give the full path of the program in `requeue: {name: command, argv: [...]}`",
        )


build = CommandRequeuer.build
command = Command()
