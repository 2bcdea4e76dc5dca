"""The requeuer `exit_code`: the exit code asks for another start."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from fairlead.config_bases import RequeueConfigBase
from fairlead.interfaces import Requeuer
from fairlead.plugin_classes import RequeuePlugin


class ExitCodeRequeueConfig(RequeueConfigBase):
    """The process exits with a code that requests a restart.

    For Kubernetes, HTCondor (`on_exit_remove = (ExitCode != 75)`) and wrappers of your own.
    """

    name: Literal["exit_code"] = "exit_code"
    code: int = Field(default=75, ge=3, le=255)
    """The exit code, 3 to 255. Default 75, `EX_TEMPFAIL` of sysexits.h. Kubeflow's `restartPolicy: ExitCode` takes
    1 to 127 as final and 128 and more as worth another start: set 200 there."""

    final_code: int | None = Field(default=None, ge=3, le=255)
    """The exit code of a final stop, as when a budget is used up. Default null: 143, or 130 after Ctrl-C. Kubeflow's
    `restartPolicy: ExitCode` restarts those: set 3 there."""

    @field_validator("code")
    @classmethod
    def _not_taken(cls, code: int) -> int:
        if code in (130, 143):
            raise ValueError(f"{code} means that no other start is wanted; for Kubernetes choose 200")
        return code


class ExitCode(RequeuePlugin):
    """Runs nothing; the exit code asks."""

    config = ExitCodeRequeueConfig
    runtime = "fairlead_hpc_signals.exit_code:build"
    extra = "lightning"


class ExitCodeRequeuer(Requeuer):
    """Does nothing by itself: who ends the process takes the code from `exit_code`."""

    config: ExitCodeRequeueConfig

    @property
    def exit_code(self) -> int:
        """What all ranks must end with."""
        return self.config.code

    def requeue(self) -> str:
        """Says which code asks."""
        return f"exit code {self.exit_code} requests a restart"


build = ExitCodeRequeuer.build
exit_code = ExitCode()
