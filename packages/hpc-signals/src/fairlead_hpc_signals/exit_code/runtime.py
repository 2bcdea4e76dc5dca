"""Asks for another start by the exit code."""

from __future__ import annotations

from fairlead.interfaces import BuildContext
from fairlead_hpc_signals.exit_code.config import ExitCodeRequeueConfig

__all__ = ["ExitCodeRequeuer", "build"]


def build(config: ExitCodeRequeueConfig, context: BuildContext) -> ExitCodeRequeuer:
    """The runtime of the requeuer `exit_code`."""
    return ExitCodeRequeuer(config)


class ExitCodeRequeuer:
    """Does nothing by itself: who ends the process takes the code from `exit_code`.

    Attributes:
        exit_code: What all ranks must end with.
    """

    def __init__(self, config: ExitCodeRequeueConfig) -> None:
        self.exit_code = config.code

    def requeue(self) -> str:
        """Says which code asks."""
        return f"exit code {self.exit_code} asks for another start"
