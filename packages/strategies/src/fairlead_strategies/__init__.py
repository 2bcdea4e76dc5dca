"""Ways to split a model over devices, as Fairlead plugins: the configs. No torch is imported here."""

from __future__ import annotations

from fairlead_strategies.ddp import DDPStrategyConfig
from fairlead_strategies.deepspeed.config import DeepSpeedStrategyConfig
from fairlead_strategies.fsdp import FSDPStrategyConfig
from fairlead_strategies.mesh.config import FSDP2MixedPrecision
from fairlead_strategies.mesh.plugins import (
    FSDP2StrategyConfig,
    HybridStrategyConfig,
    PipelineParallelStrategyConfig,
    TensorParallelStrategyConfig,
)
from fairlead_strategies.single_device import SingleDeviceStrategyConfig
from fairlead_strategies.sync_batchnorm import TorchSyncBatchNormLayerSyncConfig
from fairlead_strategies.xla import XLAStrategyConfig

__all__ = [
    "DDPStrategyConfig",
    "DeepSpeedStrategyConfig",
    "FSDP2MixedPrecision",
    "FSDP2StrategyConfig",
    "FSDPStrategyConfig",
    "HybridStrategyConfig",
    "PipelineParallelStrategyConfig",
    "SingleDeviceStrategyConfig",
    "TensorParallelStrategyConfig",
    "TorchSyncBatchNormLayerSyncConfig",
    "XLAStrategyConfig",
]
