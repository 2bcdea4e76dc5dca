"""Ways to split a model over devices, as Fairlead plugins: the configs. No torch is imported here."""

from __future__ import annotations

from fairlead_strategies.ddp import DDPMixedPrecision, DDPStrategyConfig
from fairlead_strategies.deepspeed import DeepSpeedStrategyConfig
from fairlead_strategies.fsdp import FSDPMixedPrecision, FSDPStrategyConfig
from fairlead_strategies.fsdp2.plugin import FSDP2StrategyConfig
from fairlead_strategies.single_device import SingleDeviceStrategyConfig
from fairlead_strategies.sync_batchnorm import TorchSyncBatchNormLayerSyncConfig
from fairlead_strategies.xla import XLAStrategyConfig

__all__ = [
    "DDPMixedPrecision",
    "DDPStrategyConfig",
    "DeepSpeedStrategyConfig",
    "FSDP2StrategyConfig",
    "FSDPMixedPrecision",
    "FSDPStrategyConfig",
    "SingleDeviceStrategyConfig",
    "TorchSyncBatchNormLayerSyncConfig",
    "XLAStrategyConfig",
]
