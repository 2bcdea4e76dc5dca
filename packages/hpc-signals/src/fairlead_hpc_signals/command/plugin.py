"""What the requeuer `command` contributes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from fairlead.axes import RequeuePlugin
from fairlead.findings import Finding
from fairlead.hookspecs import hookimpl
from fairlead_hpc_signals.checks import COMMAND_MISSING, check_command
from fairlead_hpc_signals.command.config import CommandRequeueConfig

if TYPE_CHECKING:
    from fairlead.resolve import Resolution

__all__ = ["Command", "command"]


class Command(RequeuePlugin):
    """Any scheduler that has a command for it."""

    config = CommandRequeueConfig
    runtime = "fairlead_hpc_signals.command.runtime:build"
    extra = "lightning"
    codes: ClassVar[Mapping[str, str]] = COMMAND_MISSING

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterable[Finding]:
        """Is the program there?"""
        config = resolution.requeue
        assert isinstance(config, CommandRequeueConfig)  # it is called for the selected plugin
        yield from check_command(config.argv[0], resolution, environ)


command = Command()
