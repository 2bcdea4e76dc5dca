"""Runs a command of the user's."""

from __future__ import annotations

from collections.abc import Mapping

from fairlead.interfaces import BuildContext
from fairlead_hpc_signals.command.config import CommandRequeueConfig
from fairlead_hpc_signals.commands import run_command

__all__ = ["CommandRequeuer", "build"]


def build(config: CommandRequeueConfig, context: BuildContext) -> CommandRequeuer:
    """The runtime of the requeuer `command`."""
    return CommandRequeuer(config, context.environ)


class CommandRequeuer:
    """Runs the command on one rank, when everything is saved."""

    def __init__(self, config: CommandRequeueConfig, environ: Mapping[str, str]) -> None:
        self._config = config
        self._environ = environ

    def requeue(self) -> str:
        """Runs the command; returns it.

        Raises:
            RunFailedError: It is not there, failed each time, or did not end.
        """
        return run_command(
            self._config.argv,
            self._config,
            self._environ,
            missing="give the full path of the program in `requeue: {name: command, argv: [...]}`",
        )
