"""Fully sharded data parallel, torch's first generation (FSDP1)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from fairlead import BuildContext, Capability, Finding, Resolution, hookimpl
from fairlead.config_bases import ConfigModel
from fairlead.findings import Inexact
from fairlead_strategies.shared import ClassPaths, ProcessGroupConfig, UnprovenStrategy, load_classes

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
    """FSDP1: parameters, gradients and optimizer state are split over the ranks.

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
    nodes."""
    cpu_offload: bool = False
    """Keep shards in CPU memory while they are not computed with: less GPU memory, slower."""
    mixed_precision: Literal[True] | FSDPMixedPrecision | None = None
    """None takes the trainer's precision; True computes, reduces and buffers in bfloat16; or each format by name."""
    auto_wrap_policy: ClassPaths | Annotated[int, Field(gt=0)] | None = None
    """Which submodules become units of their own: a list of classes (`module:Class`), or a number, for every
    submodule with at least that many parameters. None: the whole model is one unit, which saves the least memory."""
    activation_checkpointing_policy: ClassPaths | None = None
    """Classes whose activations are computed again during backward instead of being kept."""
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


class FSDP(UnprovenStrategy):
    """Fully sharded data parallel, torch's first generation. `fsdp_native` is the same under its old name."""

    config = FSDPStrategyConfig
    runtime = "fairlead_strategies.fsdp:build"
    sharded_state = True
    precision = "fsdp"
    unproven = Inexact(
        "strategy: fsdp", why="no test has resumed it: it needs GPUs", fix="strategy: fsdp2, or ddp", certain=False
    )
    codes: ClassVar[Mapping[str, str]] = {
        "fsdp-checkpoint-io": "Sharded checkpoints of FSDP do not go through `checkpoint_io`.",
        "fsdp-mesh": "The device mesh of FSDP does not have as many places as there are ranks.",
    }

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """What Lightning or torch refuse together with FSDP1."""
        yield self.no(("accelerator.cpu",), "Lightning refuses FSDP without a GPU", "strategy: fsdp2")
        yield from self.no_mps_and_xla()
        reason = "Lightning's FSDP precision has no 64-bit mode"
        yield self.no(("precision.64-true",), reason, "precision: 32-true, or strategy: ddp")
        yield self.no(
            ("precision.bitsandbytes", "precision.transformer-engine"),
            "Lightning's FSDP strategy accepts its own precision plugin only",
            "precision: 32-true, bf16-mixed, 16-mixed, bf16-true or 16-true",
        )
        yield self.no(
            ("clipping.norm",),
            "each rank sees only its part of the gradients, and Lightning refuses to compute their norm with FSDP",
            "strategy: fsdp2, or gradient_clip_algorithm: value",
        )

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """Fields that do not fit the rest of the run."""
        config = resolution.strategy
        assert isinstance(config, FSDPStrategyConfig)
        if config.state_dict_type == "sharded":
            yield Finding(
                "warning",
                "fsdp-checkpoint-io",
                f"checkpoint_io {resolution.checkpoint_io.name!r} is not used",
                where="trainer.strategy.state_dict_type",
                why="Lightning has every rank write its own part of a sharded checkpoint directly",
                fix="state_dict_type: full",
            )
        if config.device_mesh is not None and prod(config.device_mesh) != resolution.world_size:
            copies, shards = config.device_mesh
            yield Finding(
                "error",
                "fsdp-mesh",
                f"a device mesh of {copies} x {shards} does not have {resolution.world_size} places, one per rank",
                where="trainer.strategy.device_mesh",
                why=f"{copies} x {shards} = {copies * shards}",
                fix="choose sizes whose product is the number of ranks, or leave `device_mesh` out",
            )


def build(config: FSDPStrategyConfig, context: BuildContext) -> Any:
    """Lightning's strategy, with the classes of the policies imported.

    It is not subclassed: Lightning recognises exactly its own class when it refuses FSDP on a CPU.
    """
    from lightning.fabric.strategies import FSDPStrategy as FabricFSDPStrategy
    from lightning.pytorch.strategies import FSDPStrategy
    from torch.distributed.fsdp import BackwardPrefetch

    again = config.activation_checkpointing_policy
    kwargs: dict[str, Any] = {name: getattr(config, name) for name in type(config).model_fields if name != "name"} | {
        "process_group_backend": context.resolution.backend,
        "mixed_precision": _mixed_precision(config.mixed_precision),
        "auto_wrap_policy": _auto_wrap_policy(config),
        "activation_checkpointing_policy": load_classes(again, "trainer.strategy.activation_checkpointing_policy")
        if again is not None
        else None,
        "backward_prefetch": BackwardPrefetch[config.backward_prefetch] if config.backward_prefetch else None,
    }
    return FSDPStrategy(**kwargs) if context.engine == "trainer" else FabricFSDPStrategy(**kwargs)


def _auto_wrap_policy(config: FSDPStrategyConfig) -> Any:
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    policy = config.auto_wrap_policy
    if policy is None:
        return None
    if isinstance(policy, int):
        return functools.partial(size_based_auto_wrap_policy, min_num_params=policy)
    return load_classes(policy, "trainer.strategy.auto_wrap_policy")


def _mixed_precision(asked: bool | FSDPMixedPrecision | None) -> Any:
    import torch
    from torch.distributed.fsdp import MixedPrecision

    if asked is None or asked is False:
        return None
    if isinstance(asked, FSDPMixedPrecision):
        fields = asked.model_dump()
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            fields[name] = getattr(torch, fields[name]) if fields[name] else None
        return MixedPrecision(**fields)
    half = torch.bfloat16
    return MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half)


fsdp = FSDP()
fsdp_cpu_offload = FSDP(cpu_offload=True)
fsdp_native = FSDP(name="fsdp_native")  # a preset that only is another name
