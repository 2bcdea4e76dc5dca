"""Fully sharded data parallel, torch's second generation (`fully_shard`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fairlead_strategies.layout import SizeOrAuto
from fairlead_strategies.mesh.config import MeshStrategyConfig
from fairlead_strategies.mesh.plugin import MeshStrategy


class FSDP2StrategyConfig(MeshStrategyConfig):
    """Fully sharded data parallel with torch's `fully_shard`, on GPUs and CPUs.

    A module that parallelises itself in `configure_model` is left as it is. Any other is sharded
    here: its blocks, then the rest of it. `hybrid` also splits layers, sequences and stages.

    Example:
        >>> FSDP2StrategyConfig(auto_wrap_policy=["my.layers:Block"]).auto_wrap_policy
        ('my.layers:Block',)
        >>> FSDP2StrategyConfig(replicate=2).layout(8).explained()
        'replicate 2 x shard 4, with shard: auto = 8 ranks / (replicate 2) = 4'
    """

    name: Literal["fsdp2"] = "fsdp2"
    replicate: SizeOrAuto = 1
    """Copies of the sharded model (HSDP): each is sharded over `shard` ranks, as over those of a node, and gradients
    are averaged over the copies."""
    shard: SizeOrAuto = "auto"
    """Ranks that share the shards of one copy; `auto` is what the number of ranks leaves."""
    tensor: int = Field(1, gt=0)
    """Ranks that split each layer, for a module that applies its own plan in `configure_model`; `strategy: hybrid`
    applies one."""


class FSDP2(MeshStrategy):
    """Fully sharded data parallel, torch's second generation."""

    config = FSDP2StrategyConfig


fsdp2 = FSDP2()
