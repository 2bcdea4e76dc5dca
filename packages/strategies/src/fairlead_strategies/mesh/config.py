"""The settings that the strategies on a device mesh share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from fairlead.config_bases import ConfigModel
from fairlead_strategies.layout import DIMENSIONS, Layout
from fairlead_strategies.shared import ClassPaths, ProcessGroupConfig

FloatType = Literal["float32", "float16", "bfloat16"]


class FSDP2MixedPrecision(ConfigModel):
    """The number formats inside `fully_shard`, as torch's `MixedPrecisionPolicy` names them; None keeps what is there.

    The parameters that the optimizer sees keep their own format.
    """

    param_dtype: FloatType | None = None
    """Format in which parameters are gathered and computed with."""
    reduce_dtype: FloatType | None = None
    """Format in which gradients are reduced."""
    output_dtype: FloatType | None = None
    """Format that the outputs of every unit are cast to."""
    cast_forward_inputs: bool = True
    """Cast the inputs of every unit to `param_dtype`."""


class MeshStrategyConfig(ProcessGroupConfig):
    """What the strategies on a device mesh have in common: how a model becomes units, and what is done to each."""

    sizes: ClassVar[Mapping[str, int | Literal["auto"]]] = {}
    """Sizes that are no field of this strategy."""

    activation_checkpointing: ClassPaths | None = None
    """Classes whose activations are recomputed during backward instead of stored."""
    auto_wrap_policy: ClassPaths | Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Which submodules are gathered and freed as one: a list of classes (`module:Class`); a number, for submodules with
    at least that many parameters; `auto` takes the items of the outermost `ModuleList`s, which is where models keep
    their layers. An empty list makes the full model one unit."""
    reshard_after_forward: bool = True
    """Free the gathered parameters of a unit after its forward and re-gather them for backward: least memory. False
    keeps them, as ZeRO stage 2 does: less communication."""
    accumulate_unsharded: bool = False
    """With `accumulate_grad_batches`: reduce gradients only with the last batch of a step. Saves communication, but
    needs memory for the full gradients. Replicas (`replicate`) are always reduced only with the last batch."""
    cpu_offload: bool = False
    """Keep shards, their gradients and the optimizer's state in CPU memory while they are not computed with: less GPU
    memory, slower."""
    mixed_precision: FSDP2MixedPrecision | None = None
    """Number formats of parameters and gradients inside of the units, such as `{param_dtype: bfloat16, reduce_dtype:
    float32}`. Default null: `trainer.precision` alone decides."""
    save_distributed_checkpoint: bool | None = None
    """Default null: what `checkpoint_io` takes. With `distributed` every rank hands it its own part; any other gets a
    whole checkpoint, gathered on rank 0. True has Lightning write the parts itself where `checkpoint_io` does not take
    them, which holds up training until they are on disk; False always gathers (Lightning's default is True)."""

    def layout(self, world_size: int) -> Layout:
        """The mesh of so many ranks; a ConfigError where the sizes do not fit."""
        fields = [name for name in (*DIMENSIONS, "expert") if name in type(self).model_fields]
        own: dict[str, Any] = {name: getattr(self, name) for name in fields}
        return Layout.of(world_size, {**self.sizes, **own})

    def data_parallel_ranks(self, world_size: int) -> int:
        """How many of the ranks have batches of their own; see `fairlead_runs.data_ranks`."""
        return self.layout(world_size).data_parallel
