"""The backend `async`: the loop waits for a copy in memory only, a thread writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, field_validator

from fairlead.capabilities import Capability, InstalledPlugins
from fairlead.config_bases import CheckpointIOConfigBase
from fairlead.hookspecs import hookimpl
from fairlead.open_union import OpenUnion
from fairlead_checkpoint_io.torch_file import FilePlugin, TorchCheckpointIOConfig


class AsyncCheckpointIOConfig(CheckpointIOConfigBase):
    """The save returns once the state is copied to host memory; a thread writes the copy.

    It needs host memory for `max_in_flight` copies of the state of one rank, which it reuses for the next save.
    """

    name: Literal["async"] = "async"
    max_in_flight: int = Field(default=1, ge=1)
    """Saves that may be unfinished at a time, the one being written included; the next one waits. Default 1:
    a disk that is slower than the checkpoints come shows at once, and only one copy is held."""
    inner: Annotated[CheckpointIOConfigBase, OpenUnion("checkpoint_io")] = TorchCheckpointIOConfig()
    """The backend that writes: any but `async`, `remote` and `distributed`, which writes in the background itself."""

    @field_validator("inner")
    @classmethod
    def _not_itself(cls, inner: CheckpointIOConfigBase) -> CheckpointIOConfigBase:
        if inner.name == "async":
            raise ValueError("`async` cannot write through itself; choose `torch` or another backend")
        if inner.name == "remote":
            raise ValueError("write it the other way round: {name: remote, url: ..., inner: async}")
        if inner.saves_shards:
            raise ValueError(
                f"`async` writes on rank 0, {inner.name!r} on all ranks; "
                "write `checkpoint_io: {name: distributed, background: true}` for saves in the background"
            )
        return inner


class AsyncFile(FilePlugin):
    """Wraps another backend; the loop waits for a copy in memory only."""

    config = AsyncCheckpointIOConfig
    runtime = "fairlead_checkpoint_io.async_file_runtime:build"
    aliases = ("AsyncCheckpointIOPlugin",)

    @hookimpl
    def fairlead_capabilities(self, plugins: InstalledPlugins) -> Iterable[Capability]:
        """Strategies that write by themselves, or refuse it."""
        yield self.not_on_xla()
        sharded = [tag for tag, plugin in plugins.distinct("strategy").items() if plugin.sharded_state]
        if sharded:
            yield Capability(
                "checkpoint_io.async",
                tuple(f"strategy.{tag}" for tag in sharded),
                "partial",
                "sharded checkpoints are written by the strategy itself, synchronously; only full ones go through here",
                "strategy: fsdp2 with checkpoint_io: {name: distributed, background: true}, or accept that the loop "
                "waits",
            )


async_file = AsyncFile()
