"""The config of `layer_sync: torch_sync_batchnorm`."""

from __future__ import annotations

from typing import Literal

from fairlead import LayerSyncConfigBase

__all__ = ["TorchSyncBatchNormLayerSyncConfig"]


class TorchSyncBatchNormLayerSyncConfig(LayerSyncConfigBase):
    """Batch normalisation over the batches of all ranks instead of each rank's own (R69).

    Example:
        >>> TorchSyncBatchNormLayerSyncConfig().name
        'torch_sync_batchnorm'
    """

    name: Literal["torch_sync_batchnorm"] = "torch_sync_batchnorm"
