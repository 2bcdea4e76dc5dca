"""The config of the requeuer `command`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fairlead_hpc_signals.base import CommandSettings

__all__ = ["CommandRequeueConfig"]


class CommandRequeueConfig(CommandSettings):
    """Runs a command of yours on rank 0, for schedulers that have no requeuer here."""

    name: Literal["command"] = "command"
    argv: tuple[str, ...] = Field(min_length=1, strict=False)
    """The program and its arguments, as a list of words. There is no shell: `$JOB` stays `$JOB`, and the program
    reads the job's environment itself. It must end with 0 when the job will start again."""
