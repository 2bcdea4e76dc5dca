"""The config of the backend `xla`."""

from __future__ import annotations

from typing import Literal

from fairlead_checkpoint_io.base import FileCheckpointIOConfig

__all__ = ["XLACheckpointIOConfig"]


class XLACheckpointIOConfig(FileCheckpointIOConfig):
    """As `torch`; tensors are first moved from the TPU to host memory by torch_xla, all at once."""

    name: Literal["xla"] = "xla"
