"""How checkpoints reach the disk, as Fairlead plugins: `torch`, `async`, `distributed`, `remote`, `xla`.

Here are the configs, which import no torch; what is built from them is in each backend's `runtime`.
"""

from __future__ import annotations

from fairlead_checkpoint_io.async_file.config import AsyncCheckpointIOConfig
from fairlead_checkpoint_io.distributed_shards.config import DistributedCheckpointIOConfig
from fairlead_checkpoint_io.remote.config import RemoteCheckpointIOConfig
from fairlead_checkpoint_io.torch_file.config import TorchCheckpointIOConfig
from fairlead_checkpoint_io.xla_file.config import XLACheckpointIOConfig

__all__ = [
    "AsyncCheckpointIOConfig",
    "DistributedCheckpointIOConfig",
    "RemoteCheckpointIOConfig",
    "TorchCheckpointIOConfig",
    "XLACheckpointIOConfig",
]
