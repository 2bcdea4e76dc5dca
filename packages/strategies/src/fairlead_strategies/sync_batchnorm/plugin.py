"""What `torch_sync_batchnorm` contributes."""

from __future__ import annotations

from fairlead import LayerSyncPlugin
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


torch_sync_batchnorm = TorchSyncBatchNorm()
