"""The backend `distributed`: every rank writes its part, each tensor once, through torch's distributed checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import ClassVar, Literal

from pydantic import Field

from fairlead.capabilities import Capability
from fairlead.durations import Duration
from fairlead.hookspecs import hookimpl
from fairlead_checkpoint_io.torch_file import FileCheckpointIOConfig, FilePlugin

__all__ = ["DistributedCheckpointIOConfig", "DistributedShards", "distributed_shards"]


class DistributedCheckpointIOConfig(FileCheckpointIOConfig):
    """A directory into which every rank writes its part; any number of ranks, and any strategy, reads it.

    Shards (FSDP, tensor parallelism) are written where they are; what all ranks hold alike (DDP) is written once,
    spread over them. The layout is that of torch's distributed checkpoints and Lightning's `ModelParallelStrategy`.
    """

    name: Literal["distributed"] = "distributed"
    saves_shards: ClassVar[bool] = True
    background: bool = False
    """Return once each rank has copied its part to host memory, and write in a thread. It needs host memory for
    `max_in_flight` copies of that part; they are reused for the next save."""
    max_in_flight: int = Field(default=1, ge=1)
    """With `background`: saves that may be unfinished at a time; the next one waits."""
    timeout: Duration = Field(timedelta(minutes=30), gt=timedelta(0))
    """How long the ranks wait for the slowest one to write its part, before the save fails on all of them."""


class DistributedShards(FilePlugin):
    """Every rank writes its part, each tensor once."""

    config = DistributedCheckpointIOConfig
    runtime = "fairlead_checkpoint_io.distributed_shards.runtime:build"
    aliases = ("DistributedCheckpointIOPlugin",)
    formats = ("fairlead_checkpoint_io.checkpoint_format:distributed",)

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """Strategies whose state it cannot take apart."""
        name = "checkpoint_io.distributed"
        yield self.not_on_xla()
        yield Capability(
            name,
            ("strategy.deepspeed",),
            "no",
            "DeepSpeed's engine writes the state of its ranks itself, in its own layout",
            "checkpoint_io: torch, which commits what DeepSpeed has written",
        )
        yield Capability(
            name,
            ("strategy.ddp", "strategy.fsdp", "strategy.fsdp2", "strategy.single_device"),
            "yes",
            "each of them reads what the others have written",
        )


distributed_shards = DistributedShards()
