"""The config of the backend `distributed`."""

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar, Literal

from pydantic import Field

from fairlead.durations import Duration
from fairlead_checkpoint_io.base import FileCheckpointIOConfig

__all__ = ["DistributedCheckpointIOConfig"]


class DistributedCheckpointIOConfig(FileCheckpointIOConfig):
    """A directory into which every rank writes its part; any number of ranks, and any strategy, reads it.

    Shards (FSDP2, tensor parallelism) are written where they are; what all ranks hold alike (DDP) is written once,
    spread over them. The layout is that of torch's distributed checkpoints and Lightning's `ModelParallelStrategy`.

    Example:
        >>> DistributedCheckpointIOConfig(background=True).max_in_flight
        1
    """

    name: Literal["distributed"] = "distributed"
    saves_shards: ClassVar[bool] = True
    background: bool = False
    """Return once each rank has copied its part to host memory, and write in a thread. It needs host memory for
    `max_in_flight` copies of that part; they are kept for the next save."""
    max_in_flight: int = Field(default=1, ge=1)
    """With `background`: saves that may be unfinished at a time; the next one waits."""
    timeout: Duration = Field(timedelta(minutes=30), gt=timedelta(0))
    """How long the ranks wait for the slowest one to write its part, before the save fails on all of them."""
