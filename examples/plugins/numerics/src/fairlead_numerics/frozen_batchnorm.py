"""BatchNorm layers that keep the statistics that they begin with, as detection models with small batches do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from fairlead import LayerSyncConfigBase, LayerSyncPlugin, Resolution, hookimpl
from fairlead.findings import Inexact


class FrozenBatchNormLayerSyncConfig(LayerSyncConfigBase):
    """The running statistics stay as they are and are used in training too: the same on all ranks, at no cost."""

    name: Literal["frozen_batchnorm"] = "frozen_batchnorm"
    """The tag."""


class FrozenBatchNorm(LayerSyncPlugin):
    """Statistics that nobody has to exchange; weights and biases of the layers still learn."""

    config = FrozenBatchNormLayerSyncConfig
    runtime = "fairlead_numerics.frozen_batchnorm_runtime:build"
    engines = ("torch", "lightning")

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """What does not change cannot be lost."""
        return ()


frozen_batchnorm = FrozenBatchNorm()
