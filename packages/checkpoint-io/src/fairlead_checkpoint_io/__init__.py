"""How checkpoints reach the disk, as Fairlead plugins: the configs. No torch is imported here."""

from __future__ import annotations

from fairlead_checkpoint_io.async_file import AsyncCheckpointIOConfig
from fairlead_checkpoint_io.checkpoint_format import CheckpointFormat, Verified
from fairlead_checkpoint_io.distributed_shards import DistributedCheckpointIOConfig
from fairlead_checkpoint_io.remote import RemoteCheckpointIOConfig
from fairlead_checkpoint_io.torch_file import TorchCheckpointIOConfig
from fairlead_checkpoint_io.xla_file import XLACheckpointIOConfig

__all__ = [
    "AsyncCheckpointIOConfig",
    "CheckpointFormat",
    "DistributedCheckpointIOConfig",
    "RemoteCheckpointIOConfig",
    "TorchCheckpointIOConfig",
    "Verified",
    "XLACheckpointIOConfig",
]
