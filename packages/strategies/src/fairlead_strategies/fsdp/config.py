"""The config of `strategy: fsdp`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fairlead.bases import ConfigModel
from fairlead_strategies.fields import ClassPaths, ProcessGroupConfig

__all__ = ["FSDPMixedPrecision", "FSDPStrategyConfig"]

FloatType = Literal["float32", "float16", "bfloat16"]
Devices = Annotated[int, Field(gt=0)]


class FSDPMixedPrecision(ConfigModel):
    """The number formats inside FSDP1, as torch's `MixedPrecision` names them; None keeps the parameters' own."""

    param_dtype: FloatType | None = None
    """Format of the parameters during forward and backward, and so of the computation."""
    reduce_dtype: FloatType | None = None
    """Format in which gradients are reduced."""
    buffer_dtype: FloatType | None = None
    """Format of the buffers."""
    keep_low_precision_grads: bool = False
    """Keep gradients in `reduce_dtype` for the optimizer instead of casting them back."""
    cast_forward_inputs: bool = False
    """Cast the inputs of every wrapped module to `param_dtype`."""
    cast_root_forward_inputs: bool = True
    """Cast the inputs of the outermost module to `param_dtype`."""


class FSDPStrategyConfig(ProcessGroupConfig):
    """FSDP1: parameters, gradients and optimizer state are split over the ranks (R6, R21 to R26).

    It needs GPUs; `fsdp2` is its successor, works on CPUs too, and clips gradients by norm.

    Example:
        >>> FSDPStrategyConfig(activation_checkpointing_policy=("torch.nn:TransformerEncoderLayer",)).sharding_strategy
        'FULL_SHARD'
    """

    name: Literal["fsdp"] = "fsdp"
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"] = (
        "FULL_SHARD"
    )
    """What is split: `FULL_SHARD` parameters, gradients and optimizer state; `SHARD_GRAD_OP` keeps the parameters
    whole between forward and backward; `NO_SHARD` nothing, as DDP; the hybrids split within a node and copy across
    nodes (R21)."""
    cpu_offload: bool = False
    """Keep shards in CPU memory while they are not computed with: less GPU memory, slower (R24)."""
    mixed_precision: Literal[True] | FSDPMixedPrecision | None = None
    """None takes the trainer's precision; True computes, reduces and buffers in bfloat16; or the formats one by one
    (R25)."""
    auto_wrap_policy: ClassPaths | Annotated[int, Field(gt=0)] | None = None
    """Which submodules become units of their own: a list of classes (`module:Class`), or a number, for every
    submodule with at least that many parameters. None: the whole model is one unit, which saves the least memory."""
    activation_checkpointing_policy: ClassPaths | None = None
    """Classes whose activations are computed again during backward instead of being kept (R26)."""
    state_dict_type: Literal["full", "sharded"] = "full"
    """`full` gathers a checkpoint on rank 0 into one file, through `checkpoint_io`; `sharded` has every rank write
    its own part into a folder, past `checkpoint_io`."""
    device_mesh: tuple[Devices, Devices] | None = Field(None, strict=False)
    """For the hybrids: (number of copies, ranks that share one copy). None: one copy per node."""
    sync_module_states: bool = True
    """Start every rank with the parameters of rank 0, as DDP does; without it, ranks that were seeded differently
    are stitched together from different initial weights. Costs one broadcast at the start."""
    limit_all_gathers: bool = True
    """Wait before gathering the next unit, so that no more than two are whole at a time."""
    forward_prefetch: bool = False
    """Gather the next unit before the current forward has been issued; for models that the CPU cannot keep up with."""
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST"] | None = "BACKWARD_PRE"
    """Gather the next unit before or after the current gradients are computed; None saves memory and is slower."""
    use_orig_params: bool = True
    """Keep the model's own parameters visible, so that optimizers can group them."""

    @model_validator(mode="after")
    def _mesh_needs_hybrid(self) -> FSDPStrategyConfig:
        if self.device_mesh is not None and "HYBRID" not in self.sharding_strategy:
            raise ValueError("`device_mesh` has a meaning only with a hybrid `sharding_strategy`, such as HYBRID_SHARD")
        return self
