"""The config of the backend `torch`."""

from __future__ import annotations

from typing import Literal

from fairlead_checkpoint_io.base import FileCheckpointIOConfig

__all__ = ["TorchCheckpointIOConfig"]


class TorchCheckpointIOConfig(FileCheckpointIOConfig):
    """One file, complete and durable when the save returns; the default."""

    name: Literal["torch"] = "torch"
