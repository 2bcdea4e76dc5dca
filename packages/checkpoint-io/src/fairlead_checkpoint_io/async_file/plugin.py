"""What the backend `async` contributes."""

from __future__ import annotations

from collections.abc import Iterable

from fairlead.axes import CheckpointIOPlugin
from fairlead.capabilities import Capability
from fairlead.findings import Inexact
from fairlead.hookspecs import hookimpl
from fairlead.resolution import Resolution
from fairlead_checkpoint_io.async_file.config import AsyncCheckpointIOConfig

__all__ = ["AsyncFile", "async_file"]

_SHARDED = (
    "strategy.deepspeed",
    "strategy.deepspeed_stage_1",
    "strategy.deepspeed_stage_2",
    "strategy.deepspeed_stage_2_offload",
    "strategy.deepspeed_stage_3",
    "strategy.deepspeed_stage_3_offload",
    "strategy.fsdp",
    "strategy.fsdp2",
    "strategy.fsdp_native",
)


class AsyncFile(CheckpointIOPlugin):
    """Wraps another backend; the loop waits for a copy in memory only."""

    config = AsyncCheckpointIOConfig
    runtime = "fairlead_checkpoint_io.async_file.runtime:build"
    aliases = ("AsyncCheckpointIOPlugin",)
    engines = ("torch>=2.13", "lightning>=2.6.6,<2.7")
    extra = "lightning"

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """Strategies that write by themselves, or refuse it."""
        yield Capability(
            "checkpoint_io.async",
            ("strategy.xla",),
            "no",
            "Lightning's XLA strategy takes the XLA checkpoint backend only",
            "checkpoint_io: xla",
        )
        yield Capability(
            "checkpoint_io.async",
            _SHARDED,
            "partial",
            "sharded checkpoints are written by the strategy itself, synchronously; only full ones go through here",
            "strategy: fsdp2 with checkpoint_io: {name: distributed, background: true}, or accept that the loop waits",
        )

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """The wrapped backend writes; it is asked too."""
        return ()


async_file = AsyncFile()
