"""The settings of the strategies on a device mesh: what all share, and those of layers, sequences, experts, stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from fairlead.config_bases import ConfigModel
from fairlead_runs.pipeline_schedule import SCHEDULES, Schedule
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
    accumulate_unsharded: bool = False
    """With `accumulate_grad_batches`: reduce gradients only with the last batch of a step. Saves communication, but
    needs memory for the full gradients. Replicas (`replicate`) are always reduced only with the last batch."""
    cpu_offload: bool = False
    """Keep shards, their gradients and the optimizer's state in CPU memory while they are not computed with: less GPU
    memory, slower."""
    mixed_precision: Literal[True] | FSDP2MixedPrecision | None = None
    """Number formats of parameters and gradients inside of the units, such as `{param_dtype: bfloat16, reduce_dtype:
    float32}`; true computes and reduces in bfloat16. Default null: `trainer.precision` alone decides."""
    state_dict_type: Literal["full", "sharded"] | None = None
    """Default null: what `checkpoint_io` takes. With `distributed` every rank hands it its own part; any other gets a
    full checkpoint, gathered on rank 0. `sharded` has Lightning write the parts itself where `checkpoint_io` does not
    take them, which holds up training until they are on disk; `full` always gathers."""

    def layout(self, world_size: int, num_nodes: int = 1) -> Layout:
        """The mesh of so many ranks on so many nodes; a ConfigError where the sizes do not fit."""
        fields = [name for name in (*DIMENSIONS, "expert") if name in type(self).model_fields]
        own: dict[str, Any] = {name: getattr(self, name) for name in fields}
        return Layout.of(world_size, {**self.sizes, **own})

    def data_parallel_ranks(self, world_size: int) -> int:
        """How many of the ranks have different batches; see `fairlead_runs.batch_size`."""
        return self.layout(world_size).data_parallel

    @property
    def frees_units(self) -> bool:
        """Whether the gathered parameters of a unit are freed between its forward and its backward pass."""
        raise NotImplementedError


class ReshardField(MeshStrategyConfig):
    """Whether a unit is gathered twice, for the strategies that have no `sharding_strategy` to say so."""

    reshard_after_forward: bool = True
    """Free the gathered parameters of a unit after its forward and re-gather them for backward: least memory. False
    keeps them, as ZeRO stage 2 does: less communication."""

    @property
    def frees_units(self) -> bool:
        """As `reshard_after_forward` says."""
        return self.reshard_after_forward


class TensorPlanConfig(ReshardField):
    """How layers are split, for the strategies that do."""

    plan: dict[str, str] | Literal["auto"] = "auto"
    """Which layer is split how: patterns of module names (`blocks.*.up: colwise`, `blocks.*.down: rowwise`; of several
    that match, the last counts), with the words of `fairlead_distributed.parallel.plans.WORDS`. `auto` knows the blocks
    of Llama, Qwen, GPT-2 and torch.nn, and refuses a model in which it finds none."""
    sequence_parallel: bool = False
    """Also split what lies between the split layers, such as norms, along the sequence: less memory for activations,
    the same communication."""
    loss_parallel: bool = False
    """Leave the logits of a split output layer on their ranks and compute the cross entropy of the parts."""

    @model_validator(mode="before")
    @classmethod
    def _plan_says_something(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("plan") == {}:
            raise ValueError("`plan` is empty, and nothing would be split; write `auto`, or patterns of layers")
        return data


class ContextFields(MeshStrategyConfig):
    """How the ranks that share a sequence compute its attention."""

    context_method: Literal["allgather", "ulysses"] = "allgather"
    """How attention sees the full sequence: keys and values of all ranks are gathered, or heads are exchanged for
    positions (Ulysses, arXiv:2309.14509)."""
    context_balance: bool = True
    """Give each rank a piece of the beginning and one of the end of the sequence, so that causal attention costs all
    the same. The length must be a multiple of twice `context` then."""


class ExpertFields(MeshStrategyConfig):
    """How many ranks share the experts of a mixture."""

    expert: int = Field(1, gt=0)
    """Ranks of `shard` that share the experts of each mixture: each has some of them, reads different samples and
    sends their tokens to the experts that they choose. A mixture is a module with `router` (or `gate`), `experts` and
    `top_k`, whose output is the sum of the chosen experts, weighted by the router's softmax. Adds no ranks."""


Numbers = Annotated[
    tuple[Annotated[int, Field(gt=0)], ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)
]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]


class PipelineFields(ReshardField):
    """How a model becomes stages, and in which order they work."""

    schedule: Schedule = "1f1b"
    """In which order a rank works on micro-batches. `gpipe`: all forward passes, then all backward passes; keeps the
    activations of all micro-batches. `1f1b`: a backward pass as soon as there is one; keeps those of as many
    micro-batches as there are stages. `interleaved_1f1b`: several short stages a rank, a smaller bubble.
    `interleaved_zero_bubble` and `zbv_zero_bubble` compute gradients of weights where a rank would wait."""
    micro_batches: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Into how many parts a batch is cut; a batch that they do not divide is cut into fewer. `auto`: up to four times
    the stages' ranks, with which ranks wait for less than a fifth of a step."""
    stages_per_rank: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Stages on each rank; `auto`: as many as the schedule needs, 1 or 2."""
    split: Literal["parameters", "layers"] | Numbers | Names = "parameters"
    """Where the stages begin. `parameters` and `layers` give all stages about as many of them. A list of numbers says
    how many layers each stage has (`[8, 8, 8]`: the last of four takes the rest); a list of names with which layer each
    one begins."""
    first_stage_less_layers: float = Field(0, ge=0)
    """Layers that the first stage has less than others, since it has other work, such as an embedding."""
    last_stage_less_layers: float = Field(0, ge=0)
    """Layers that the last stage has less than others: it has the output layer and the loss."""
    check_loss: bool = True
    """Compare the loss of the first step with that of the full batch, which shows whether `pipeline_weight` is needed.
    It stores the outputs of that batch."""

    @property
    def local_stages(self) -> int:
        """Stages on each rank."""
        fewest, _ = SCHEDULES[self.schedule].stages_per_rank
        return fewest if self.stages_per_rank == "auto" else self.stages_per_rank
