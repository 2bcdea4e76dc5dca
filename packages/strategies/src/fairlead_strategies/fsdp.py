"""Fully sharded data parallel, torch's first generation (FSDP1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from fairlead import Capability, Finding, Resolution, hookimpl
from fairlead.config_bases import ConfigModel
from fairlead.findings import Inexact
from fairlead_strategies.shared import ClassPaths, LightningStrategy, ProcessGroupConfig

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

    `fsdp2` is its successor. On a CPU it is for tests and trials: the same code runs there, over gloo.

    Example:
        >>> FSDPStrategyConfig(activation_checkpointing_policy=("torch.nn:TransformerEncoderLayer",)).sharding_strategy
        'FULL_SHARD'
    """

    name: Literal["fsdp"] = "fsdp"
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"] = (
        "FULL_SHARD"
    )
    """What is split: `FULL_SHARD` parameters, gradients and optimizer state; `SHARD_GRAD_OP` keeps the parameters
    gathered between forward and backward; `NO_SHARD` nothing, as DDP; the hybrids split within a node and copy across
    nodes."""
    cpu_offload: bool = False
    """Keep shards in CPU memory while they are not computed with: less GPU memory, slower."""
    mixed_precision: Literal[True] | FSDPMixedPrecision | None = None
    """None takes the trainer's precision; True computes, reduces and buffers in bfloat16; or each format by name."""
    auto_wrap_policy: ClassPaths | Annotated[int, Field(gt=0)] | None = None
    """Which submodules become units of their own: a list of classes (`module:Class`), or a number, for every
    submodule with at least that many parameters. None: the full model is one unit, which saves the least memory."""
    activation_checkpointing_policy: ClassPaths | None = None
    """Classes whose activations are recomputed during backward instead of stored. `activation_checkpointing` is
    accepted too."""
    state_dict_type: Literal["full", "sharded"] | None = None
    """Default null: what `checkpoint_io` takes. With `distributed` every rank hands it its own part; any other gets a
    full checkpoint, gathered on rank 0. `sharded` has Lightning write the parts itself where `checkpoint_io` does not
    take them, which holds up training until they are on disk; `full` always gathers (Lightning's default)."""
    device_mesh: tuple[Devices, Devices] | None = Field(None, strict=False)
    """For the hybrids: (number of copies, ranks that share one copy). None: one copy per node."""
    sync_module_states: bool = True
    """Start every rank with the parameters of rank 0, as DDP does; without it, ranks that were seeded differently
    are stitched together from different initial weights. Costs one broadcast at the start."""
    limit_all_gathers: bool = True
    """Wait before gathering the next unit, so that no more than two are gathered at a time."""
    forward_prefetch: bool = False
    """Gather the next unit before the current forward has been issued; for models that the CPU cannot keep up with."""
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST"] | None = "BACKWARD_PRE"
    """Gather the next unit before or after the current gradients are computed; None saves memory and is slower."""
    use_orig_params: bool = True
    """Keep the model's own parameters visible, so that optimizers can group them."""

    @model_validator(mode="before")
    @classmethod
    def _short_name(cls, data: Any) -> Any:
        short, long = "activation_checkpointing", "activation_checkpointing_policy"
        if not isinstance(data, dict) or short not in data:
            return data
        if long in data:
            raise ValueError(f"`{short}` is another name of `{long}`; give one of them")
        return {long if key == short else key: value for key, value in data.items()}

    @model_validator(mode="after")
    def _mesh_needs_hybrid(self) -> FSDPStrategyConfig:
        if self.device_mesh is not None and "HYBRID" not in self.sharding_strategy:
            raise ValueError("`device_mesh` has a meaning only with a hybrid `sharding_strategy`, such as HYBRID_SHARD")
        return self


class FSDP(LightningStrategy):
    """Fully sharded data parallel, torch's first generation. `fsdp_native` is the same under its old name."""

    config = FSDPStrategyConfig
    runtime = "fairlead_strategies.fsdp_runtime:build"
    sharded_state = True
    precision = "fsdp"
    codes: ClassVar[Mapping[str, str]] = {
        "fsdp-checkpoint-io": "`state_dict_type` of FSDP does not fit `checkpoint_io`.",
        "fsdp-cpu-offload": "FSDP is to move its shards to the memory of the CPU on which it computes.",
        "fsdp-mesh": "The device mesh of FSDP does not have as many positions as there are ranks.",
    }

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """What Lightning or torch refuse together with FSDP1."""
        yield from self.no_mps_and_xla()
        reason = "Lightning's FSDP precision has no 64-bit mode"
        yield self.no(("precision.64-true",), reason, "precision: 32-true, or strategy: ddp")
        yield self.no(
            ("precision.bitsandbytes", "precision.fp8-torchao", "precision.transformer-engine"),
            "Lightning's FSDP strategy accepts its own precision plugin only",
            "precision: 32-true, bf16-mixed, 16-mixed, bf16-true or 16-true",
        )

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """Fields that do not fit the rest of the run."""
        config = resolution.strategy
        assert isinstance(config, FSDPStrategyConfig)
        takes_shards, name = resolution.checkpoint_io.saves_shards, resolution.checkpoint_io.name
        where = "trainer.strategy.state_dict_type"
        if config.state_dict_type == "sharded" and not takes_shards:
            yield Finding(
                "warning",
                "fsdp-checkpoint-io",
                f"checkpoint_io {name!r} does not write the checkpoints, it only commits them",
                where=where,
                why="Lightning has every rank write its own part of a sharded checkpoint, and the training waits",
                fix="checkpoint_io: distributed",
            )
        if takes_shards and config.state_dict_type == "full":
            yield Finding(
                "error",
                "fsdp-checkpoint-io",
                f"checkpoint_io {name!r} writes the part of each rank, but rank 0 would gather all of it",
                where=where,
                fix="leave state_dict_type out, or use checkpoint_io: torch",
            )
        if takes_shards and not config.use_orig_params:
            yield Finding(
                "error",
                "fsdp-checkpoint-io",
                f"checkpoint_io {name!r} knows the optimizer's parameters by their names, and here they have none",
                where="trainer.strategy.use_orig_params",
                why="without use_orig_params an optimizer has one flat parameter for each unit",
                fix="leave use_orig_params out, or use checkpoint_io: torch",
            )
        if config.cpu_offload and resolution.device_type == "cpu":
            yield Finding(
                "info",
                "fsdp-cpu-offload",
                "cpu_offload has nothing to do on a CPU",
                where="trainer.strategy.cpu_offload",
                why="the shards are in its memory already",
                fix="leave it in for GPUs, or out",
            )
        if config.device_mesh is not None and prod(config.device_mesh) != resolution.world_size:
            copies, shards = config.device_mesh
            yield Finding(
                "error",
                "fsdp-mesh",
                f"a device mesh of {copies} x {shards} does not have {resolution.world_size} positions, one per rank",
                where="trainer.strategy.device_mesh",
                why=f"{copies} x {shards} = {copies * shards}",
                fix="choose sizes whose product is the number of ranks, or leave `device_mesh` out",
            )

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterator[Inexact]:
        """Shown on CPUs: a unit always reduces the same gradients together."""
        config = resolution.strategy
        assert isinstance(config, FSDPStrategyConfig)
        past = config.state_dict_type == "sharded" and not resolution.checkpoint_io.saves_shards
        doubts = {
            "state_dict_type: sharded": past,
            "use_orig_params: false": not config.use_orig_params,
            f"{resolution.world_size} ranks over {resolution.backend}": resolution.backend != "gloo"
            and resolution.world_size > 2,
        }
        for what, doubtful in doubts.items():
            if doubtful:
                yield Inexact(
                    f"strategy: fsdp with {what}",
                    why="no test has resumed that",
                    fix="accelerator: cpu, and the defaults of these fields, where it matters",
                    certain=False,
                )


fsdp = FSDP()
fsdp_cpu_offload = FSDP(cpu_offload=True)
fsdp_native = FSDP(name="fsdp_native")  # a preset that only is another name
