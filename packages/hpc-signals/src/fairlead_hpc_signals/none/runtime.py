"""Does not have the job started again."""

from __future__ import annotations

from fairlead.interfaces import BuildContext
from fairlead_hpc_signals.none.config import NoneRequeueConfig

__all__ = ["NoRequeuer", "build"]


def build(config: NoneRequeueConfig, context: BuildContext) -> NoRequeuer:
    """The runtime of the requeuer `none`."""
    return NoRequeuer()


class NoRequeuer:
    """Leaves it at that."""

    def requeue(self) -> str:
        """Says that nothing was done."""
        return "not requeued (requeue: none)"
