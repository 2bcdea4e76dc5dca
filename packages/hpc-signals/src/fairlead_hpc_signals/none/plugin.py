"""What the requeuer `none` contributes."""

from __future__ import annotations

from fairlead.axes import RequeuePlugin
from fairlead_hpc_signals.none.config import NoneRequeueConfig

__all__ = ["NoRequeue", "none"]


class NoRequeue(RequeuePlugin):
    """The end is the end."""

    config = NoneRequeueConfig
    runtime = "fairlead_hpc_signals.none.runtime:build"
    extra = "lightning"
    guard = "fairlead_hpc_signals.guards:build"


none = NoRequeue()
