"""What the backend `distributed` contributes."""

from __future__ import annotations

from collections.abc import Iterable

from fairlead.axes import CheckpointIOPlugin
from fairlead.capabilities import Capability
from fairlead.findings import Inexact
from fairlead.hookspecs import hookimpl
from fairlead.resolution import Resolution
from fairlead_checkpoint_io.distributed_shards.config import DistributedCheckpointIOConfig

__all__ = ["DistributedShards", "distributed_shards"]


class DistributedShards(CheckpointIOPlugin):
    """Every rank writes its part, each tensor once."""

    config = DistributedCheckpointIOConfig
    runtime = "fairlead_checkpoint_io.distributed_shards.runtime:build"
    aliases = ("DistributedCheckpointIOPlugin",)
    engines = ("torch>=2.13", "lightning>=2.6.6,<2.7")
    extra = "lightning"

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """Strategies whose state it cannot take apart."""
        name = "checkpoint_io.distributed"
        yield Capability(
            name,
            ("strategy.xla",),
            "no",
            "Lightning's XLA strategy takes the XLA checkpoint backend only",
            "checkpoint_io: xla",
        )
        yield Capability(
            name,
            ("strategy.deepspeed",),
            "no",
            "DeepSpeed's engine writes the state of its ranks itself, in its own layout",
            "checkpoint_io: torch, which commits what DeepSpeed has written",
        )
        yield Capability(
            name,
            ("strategy.fsdp",),
            "no",
            "the first FSDP gives its shards to its own writer only",
            "strategy: fsdp2, or checkpoint_io: torch",
        )
        yield Capability(
            name,
            ("strategy.ddp", "strategy.fsdp2", "strategy.single_device"),
            "yes",
            "each of them reads what the others have written",
        )

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterable[Inexact]:
        """Every rank's part is written as it is."""
        return ()


distributed_shards = DistributedShards()
