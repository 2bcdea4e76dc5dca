"""The requeuer `none`: nobody starts the job again."""

from __future__ import annotations

from typing import Literal

from fairlead.config_bases import RequeueConfigBase
from fairlead.plugin_classes import RequeuePlugin
from fairlead_hpc_signals.jobs import ConfiguredRequeuer


class NoneRequeueConfig(RequeueConfigBase):
    """Nobody starts the job again; it still saves and stops when a signal comes."""

    name: Literal["none"] = "none"


class NoRequeue(RequeuePlugin):
    """The end is the end."""

    config = NoneRequeueConfig
    runtime = "fairlead_hpc_signals.none:build"
    extra = "lightning"


class NoRequeuer(ConfiguredRequeuer[NoneRequeueConfig]):
    """Leaves it at that."""

    def requeue(self) -> str:
        """Says that nothing was done."""
        return "not requeued (requeue: none)"


build = NoRequeuer.build
none = NoRequeue()
