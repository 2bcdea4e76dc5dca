"""The requeuer `none`: the job is not restarted."""

from __future__ import annotations

from typing import Literal

from fairlead.config_bases import RequeueConfigBase
from fairlead.interfaces import Requeuer
from fairlead.plugin_classes import RequeuePlugin


class NoneRequeueConfig(RequeueConfigBase):
    """Does not requeue the job; it still saves and stops on a signal."""

    name: Literal["none"] = "none"


class NoRequeue(RequeuePlugin):
    """The end is the end."""

    config = NoneRequeueConfig
    runtime = "fairlead_hpc_signals.none:build"
    extra = "lightning"


class NoRequeuer(Requeuer):
    """Leaves it at that."""

    config: NoneRequeueConfig

    def requeue(self) -> str:
        """Says that nothing was done."""
        return "not requeued (requeue: none)"


build = NoRequeuer.build
none = NoRequeue()
