"""What `torch_sync_batchnorm` contributes."""

from __future__ import annotations

from collections.abc import Iterable

from fairlead import LayerSyncPlugin, hookimpl
from fairlead.findings import Inexact
from fairlead.resolve import Resolution
from fairlead_strategies.fields import LIGHTNING
from fairlead_strategies.sync_batchnorm.config import TorchSyncBatchNormLayerSyncConfig

__all__ = ["TorchSyncBatchNorm", "torch_sync_batchnorm"]


class TorchSyncBatchNorm(LayerSyncPlugin):
    """Converts BatchNorm layers to synchronised ones; on a CPU too, where torch's own refuse to run."""

    config = TorchSyncBatchNormLayerSyncConfig
    runtime = "fairlead_strategies.sync_batchnorm.runtime:build"
    aliases = ("TorchSyncBatchNormPlugin",)
    engines = LIGHTNING
    extra = "lightning"

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """The running statistics are buffers, and ranks are summed in one order."""
        return ()


torch_sync_batchnorm = TorchSyncBatchNorm()
