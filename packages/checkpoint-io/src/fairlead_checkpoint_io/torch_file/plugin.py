"""What the backend `torch` contributes."""

from __future__ import annotations

from collections.abc import Iterable

from fairlead.axes import CheckpointIOPlugin
from fairlead.capabilities import Capability
from fairlead.findings import Inexact
from fairlead.hookspecs import hookimpl
from fairlead.resolution import Resolution
from fairlead_checkpoint_io.torch_file.config import TorchCheckpointIOConfig

__all__ = ["TorchFile", "torch_file"]


class TorchFile(CheckpointIOPlugin):
    """Writes with `torch.save` through a temporary file in the destination directory."""

    config = TorchCheckpointIOConfig
    runtime = "fairlead_checkpoint_io.torch_file.runtime:build"
    aliases = ("TorchCheckpointIOPlugin",)
    engines = ("torch>=2.13", "lightning>=2.6.6,<2.7")
    extra = "lightning"

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """Lightning's XLA strategies refuse it."""
        yield Capability(
            "checkpoint_io.torch",
            ("strategy.xla",),
            "no",
            "Lightning's XLA strategy takes the XLA checkpoint backend only",
            "checkpoint_io: xla",
        )

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """The state is written as it is."""
        return ()


torch_file = TorchFile()
