"""The backend `torch`: one file, written before the save returns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from fairlead.capabilities import Capability
from fairlead.config_bases import CheckpointIOConfigBase
from fairlead.engines import LIGHTNING
from fairlead.findings import Inexact
from fairlead.hookspecs import hookimpl
from fairlead.plugin_classes import CheckpointIOPlugin
from fairlead.resolution import Resolution


class FileCheckpointIOConfig(CheckpointIOConfigBase):
    """The settings that all backends have that write with `torch.save`.

    What they write is readable by `torch.load(path, weights_only=True)`.
    """

    safe_globals: tuple[str, ...] = Field(default=(), strict=False)
    """Classes and functions, as `package.module.Name`, that a checkpoint may contain besides tensors and plain
    data. Loading one imports and calls it, so name only what you trust. Default none: nothing is run on loading."""
    verify: bool = True
    """Compare the checksums inside the file while it is being loaded; torch itself does not. Off: loading is
    somewhat faster, and flipped bits go unnoticed."""

    @field_validator("safe_globals")
    @classmethod
    def _dotted(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if "." not in name or not all(part.isidentifier() for part in name.split(".")):
                raise ValueError(f"{name!r} is not a name like argparse.Namespace")
        return names


class TorchCheckpointIOConfig(FileCheckpointIOConfig):
    """One file, complete and durable when the save returns; the default."""

    name: Literal["torch"] = "torch"


class FilePlugin(CheckpointIOPlugin):
    """What the backends have in common that write with `torch.save`."""

    engines: ClassVar[tuple[str, ...]] = (*LIGHTNING, "xxhash", "zlib-ng")
    extra = "lightning"

    def not_on_xla(self, fix: str = "checkpoint_io: xla") -> Capability:
        """That Lightning's XLA strategies refuse it."""
        reason = "Lightning's XLA strategy takes the XLA checkpoint backend only"
        return Capability(f"checkpoint_io.{self.tag}", ("strategy.xla",), "no", reason, fix)

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """The state is written as it is; a wrapped backend decides, too."""
        return ()


class TorchFile(FilePlugin):
    """Writes with `torch.save` through a temporary file in the destination directory."""

    config = TorchCheckpointIOConfig
    runtime = "fairlead_checkpoint_io.torch_file_runtime:build"
    aliases = ("TorchCheckpointIOPlugin",)
    formats = tuple(
        f"fairlead_checkpoint_io.checkpoint_format:{name}"
        for name in ("torch_file", "deepspeed", "safetensors", "transformers")
    )

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """Lightning's XLA strategies refuse it."""
        yield self.not_on_xla()


torch_file = TorchFile()
