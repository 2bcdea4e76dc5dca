"""Ways to split a model over devices, as Fairlead plugins: the configs. No torch is imported here."""

from __future__ import annotations

from fairlead_strategies.ddp.config import DDPStrategyConfig
from fairlead_strategies.deepspeed.config import DeepSpeedStrategyConfig
from fairlead_strategies.fsdp.config import FSDPMixedPrecision, FSDPStrategyConfig
from fairlead_strategies.fsdp2.config import FSDP2StrategyConfig
from fairlead_strategies.single_device.config import SingleDeviceStrategyConfig
from fairlead_strategies.sync_batchnorm.config import TorchSyncBatchNormLayerSyncConfig
from fairlead_strategies.xla.config import XLAStrategyConfig

__all__ = [
    "DDPStrategyConfig",
    "DeepSpeedStrategyConfig",
    "FSDP2StrategyConfig",
    "FSDPMixedPrecision",
    "FSDPStrategyConfig",
    "SingleDeviceStrategyConfig",
    "TorchSyncBatchNormLayerSyncConfig",
    "XLAStrategyConfig",
]
