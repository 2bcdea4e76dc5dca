"""The backend `xla`: as `torch`, for tensors on TPUs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from fairlead.capabilities import Capability
from fairlead.hookspecs import hookimpl
from fairlead_checkpoint_io.torch_file import FileCheckpointIOConfig, FilePlugin


class XLACheckpointIOConfig(FileCheckpointIOConfig):
    """As `torch`; tensors are first moved from the TPU to host memory by torch_xla, all at once."""

    name: Literal["xla"] = "xla"


class XLAFile(FilePlugin):
    """The backend for XLA strategies."""

    config = XLACheckpointIOConfig
    runtime = "fairlead_checkpoint_io.xla_file_runtime:build"
    aliases = ("XLACheckpointIOPlugin",)
    engines = (*FilePlugin.engines, "torch-xla")
    extra = "xla"

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """It is of no use on other devices."""
        yield Capability(
            "checkpoint_io.xla",
            ("accelerator.cpu", "accelerator.cuda", "accelerator.gpu", "accelerator.mps"),
            "no",
            "it moves tensors through torch_xla, which serves XLA devices only",
            "checkpoint_io: torch",
        )


xla_file = XLAFile()
