"""The layer sync itself; imported only when a run is built."""

from __future__ import annotations

from lightning.pytorch.plugins import LayerSync
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from fairlead import BuildContext
from fairlead_numerics.frozen_batchnorm import FrozenBatchNormLayerSyncConfig


class FrozenBatchNormSync(LayerSync):
    """Layers are changed in place, so that references to them stay good."""

    def __init__(self) -> None:
        self._kinds: dict[_BatchNorm, type[_BatchNorm]] = {}

    def apply(self, model: Module) -> Module:
        """The same model; its BatchNorm layers are never in training mode."""
        for module in model.modules():
            if isinstance(module, _BatchNorm) and module not in self._kinds:
                kind = self._kinds[module] = type(module)
                module.__class__ = type(f"Frozen{kind.__name__}", (kind,), {"train": lambda self, mode=True: self})
                module.training = False
        return model

    def revert(self, model: Module) -> Module:
        """The same model, its layers what they were."""
        while self._kinds:
            module, kind = self._kinds.popitem()
            module.__class__ = kind
        return model


def build(config: FrozenBatchNormLayerSyncConfig, context: BuildContext) -> FrozenBatchNormSync:
    """The layer sync that a config describes."""
    return FrozenBatchNormSync()
