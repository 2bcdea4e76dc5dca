"""The config of `strategy: fsdp2`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fairlead_strategies.fields import ClassPaths, ProcessGroupConfig

__all__ = ["FSDP2StrategyConfig"]


class FSDP2StrategyConfig(ProcessGroupConfig):
    """Fully sharded data parallel with torch's `fully_shard`, on GPUs and CPUs.

    A module that parallelises itself in `configure_model` is left as it is. Any other is sharded
    here: its blocks, then the rest of it.

    Example:
        >>> FSDP2StrategyConfig(auto_wrap_policy=["my.layers:Block"]).auto_wrap_policy
        ('my.layers:Block',)
    """

    name: Literal["fsdp2"] = "fsdp2"
    auto_wrap_policy: ClassPaths | Literal["auto"] = "auto"
    """Which submodules are gathered and freed as one: a list of classes (`module:Class`); `auto` takes the items of
    the outermost `ModuleList`s, which is where models keep their layers. An empty list makes the whole model one
    unit."""
    reshard_after_forward: bool = True
    """Free the gathered parameters of a unit after its forward and gather them again for backward: least memory.
    False keeps them, as ZeRO stage 2 does: less communication."""
    data_parallel_size: int | Literal["auto"] = Field("auto")
    """Ranks that share the shards; `auto` is the number of ranks divided by `tensor_parallel_size` (Lightning's own
    `auto` is the number of nodes)."""
    tensor_parallel_size: int = Field(1, gt=0)
    """Ranks that split each layer. More than 1 needs a module that applies its own plan in `configure_model`."""
    save_distributed_checkpoint: bool | None = None
    """Default null: what `checkpoint_io` takes. With `distributed` every rank hands it its own part; any other gets a
    whole checkpoint, gathered on rank 0. True has Lightning write the parts itself where `checkpoint_io` does not take
    them, which holds up training until they are on disk; False always gathers (Lightning's default is True)."""
