"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from fairlead import LayerSyncConfigBase, LayerSyncPlugin, Resolution, hookimpl
from fairlead.engines import LIGHTNING
from fairlead.findings import Inexact


class TorchSyncBatchNormLayerSyncConfig(LayerSyncConfigBase):
    """Batch normalisation over the batches of all ranks instead of each rank's own."""

    name: Literal["torch_sync_batchnorm"] = "torch_sync_batchnorm"


class TorchSyncBatchNorm(LayerSyncPlugin):
    """Converts BatchNorm layers to synchronised ones; on a CPU too, where torch's own refuse to run."""

    config = TorchSyncBatchNormLayerSyncConfig
    runtime = "fairlead_strategies.sync_batchnorm_runtime:build"
    aliases = ("TorchSyncBatchNormPlugin",)
    engines = LIGHTNING
    extra = "lightning"

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """The running statistics are buffers, and ranks are summed in one order."""
        return ()


torch_sync_batchnorm = TorchSyncBatchNorm()
