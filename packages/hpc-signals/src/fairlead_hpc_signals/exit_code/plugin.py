"""What the requeuer `exit_code` contributes."""

from __future__ import annotations

from fairlead.axes import RequeuePlugin
from fairlead_hpc_signals.exit_code.config import ExitCodeRequeueConfig

__all__ = ["ExitCode", "exit_code"]


class ExitCode(RequeuePlugin):
    """Runs nothing; the exit code asks."""

    config = ExitCodeRequeueConfig
    runtime = "fairlead_hpc_signals.exit_code.runtime:build"
    extra = "lightning"


exit_code = ExitCode()
