"""Writes checkpoints of XLA devices, in an `XLACheckpointIO`, as Lightning's XLA strategies accept no other."""

from __future__ import annotations

import importlib
from typing import Any

from lightning.fabric.plugins import XLACheckpointIO

from fairlead.interfaces import BuildContext
from fairlead_checkpoint_io.files.snapshot import Snapshot, on_host
from fairlead_checkpoint_io.torch_file import FileCheckpointIOConfig
from fairlead_checkpoint_io.torch_file_runtime import TorchFileCheckpointIO


def build(config: FileCheckpointIOConfig, context: BuildContext) -> XLAFileCheckpointIO:
    """The runtime of the backend `xla`."""
    return XLAFileCheckpointIO(config)


class XLAFileCheckpointIO(TorchFileCheckpointIO, XLACheckpointIO):
    """As `TorchFileCheckpointIO`, with one transfer for all tensors that are on XLA devices."""

    def _on_host(self, checkpoint: dict[str, Any]) -> Snapshot:
        xla_model = importlib.import_module("torch_xla.core.xla_model")
        # What xm.save and Lightning call: one synchronisation for all tensors instead of one for each.
        return on_host(xla_model._maybe_convert_to_cpu(checkpoint, convert=True))
