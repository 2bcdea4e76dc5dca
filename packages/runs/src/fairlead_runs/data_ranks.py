"""How many ranks have batches of their own: fewer than all where some share each batch, as in tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from fairlead.resolution import Resolution


@runtime_checkable
class SharesBatches(Protocol):
    """The config of a strategy in which several ranks may work on one batch.

    Example:
        >>> class Pairs:
        ...     def data_parallel_ranks(self, world_size):
        ...         return world_size // 2
        >>> isinstance(Pairs(), SharesBatches)
        True
    """

    def data_parallel_ranks(self, world_size: int) -> int:
        """How many batches the ranks take at a time; a ConfigError where so many ranks cannot be laid out."""


@runtime_checkable
class LaidOut(Protocol):
    """What such a strategy has at run time, as `layout`."""

    @property
    def data_parallel(self) -> int:
        """How many batches the ranks take at a time: one each replica."""

    @property
    def neighbours(self) -> int:
        """How many consecutive ranks share a batch; with stages of a pipeline, others far away do too."""

    def data_rank(self, rank: int) -> int:
        """Which replica a rank belongs to."""


def data_ranks(resolution: Resolution) -> int:
    """How many batches the ranks of a run take at a time.

    Raises:
        ConfigError: So many ranks cannot be laid out as the strategy asks.
    """
    strategy: Any = resolution.strategy
    if isinstance(strategy, SharesBatches):
        return strategy.data_parallel_ranks(resolution.world_size)
    return resolution.world_size


def replicas_in(metadata: Mapping[str, Any]) -> tuple[int, int]:
    """Of a checkpoint with a `world_size`: the replicas, and the consecutive ranks that shared a batch of each."""
    replicas = metadata.get("replicas")
    return (int(replicas[0]), int(replicas[1])) if replicas else (int(metadata["world_size"]), 1)


def replicas_of(strategy: object, world_size: int) -> tuple[int, int]:
    """The same of a strategy that runs."""
    layout = getattr(strategy, "layout", None)
    return (layout.data_parallel, layout.neighbours) if isinstance(layout, LaidOut) else (world_size, 1)
