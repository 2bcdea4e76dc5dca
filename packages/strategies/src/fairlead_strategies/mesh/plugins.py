"""The strategies on a device mesh: their settings, rows of the capability table, findings, and word on exactness."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Final, Literal

from pydantic import Field

from fairlead import Capability, Finding, Resolution, hookimpl
from fairlead.engines import too_old
from fairlead.errors import ConfigError
from fairlead.findings import Inexact
from fairlead_runs.pipeline_schedule import SCHEDULES, bubble_fraction, usable
from fairlead_strategies.layout import Layout, SizeOrAuto
from fairlead_strategies.mesh.config import (
    ContextFields,
    ExpertFields,
    MeshStrategyConfig,
    PipelineFields,
    ReshardField,
    TensorPlanConfig,
)
from fairlead_strategies.shared import LightningStrategy

CODES: Final[Mapping[str, str]] = {
    "pipeline-alone": "A pipeline of one rank.",
    "pipeline-bubble": "The part of each step in which the ranks of a pipeline wait.",
    "pipeline-checkpoint-io": "The checkpoint_io takes shards, and a pipeline gathers full checkpoints.",
    "pipeline-divergence": "The ranks of a pipeline hold different layers, which cannot be compared.",
    "pipeline-micro-batches": "The number of micro-batches does not fit the schedule or the stages.",
    "pipeline-stages": "The schedule does not take so many stages on a rank.",
}


def pipeline_findings(config: PipelineFields, layout: Layout, resolution: Resolution) -> Iterator[Finding]:
    """The bubble, and settings that do not fit each other or the rest of the run."""
    ranks, local = layout.pipeline, config.local_stages
    where = "trainer.strategy"
    if ranks == 1:
        return
    fewest, most = SCHEDULES[config.schedule].stages_per_rank
    if local < fewest or (most is not None and local > most):
        wanted = f"{fewest}" if fewest == most else f"{fewest} or more"
        yield Finding(
            "error",
            "pipeline-stages",
            f"{config.schedule} takes {wanted} stages a rank, not {local}",
            where=f"{where}.stages_per_rank",
            fix="leave stages_per_rank out, or choose an interleaved schedule for several stages",
        )
        return
    yield from _micro_batches(config, ranks, local)
    if resolution.checkpoint_io.saves_shards or config.state_dict_type == "sharded":
        yield Finding(
            "error",
            "pipeline-checkpoint-io",
            "a pipeline gathers its checkpoint on rank 0, and does not write it in parts",
            where="trainer.checkpoint_io" if resolution.checkpoint_io.saves_shards else f"{where}.state_dict_type",
            fix="checkpoint_io: torch, and leave state_dict_type out",
        )
    if resolution.trainer.check_divergence_every_n_steps is not None:
        yield Finding(
            "error",
            "pipeline-divergence",
            "the ranks of a pipeline hold different layers, and have nothing to compare",
            where="trainer.check_divergence_every_n_steps",
            fix="leave it out",
        )


def _micro_batches(config: PipelineFields, ranks: int, local: int) -> Iterator[Finding]:
    requested, where = config.micro_batches, "trainer.strategy.micro_batches"
    count = 4 * ranks if requested == "auto" else requested
    if not usable(config.schedule, count, ranks):
        rounds = count // ranks
        yield Finding(
            "error",
            "pipeline-micro-batches",
            f"{config.schedule} cannot be laid out for {count} micro-batches on {ranks} ranks",
            where=where,
            why=f"it goes in {rounds} rounds of equal size, and {rounds} does not divide {count}",
            fix=f"micro_batches: {rounds * ranks}",
        )
        return
    fraction = bubble_fraction(ranks, count, local)
    most = "at most " if "zero_bubble" in config.schedule else ""
    divided = f"({ranks} - 1) / ({f'{local} x ' if local > 1 else ''}{count} + {ranks} - 1)"
    says = f"the ranks wait {most}{fraction:.0%} of each step: {divided}"
    if count < ranks * local:
        yield Finding(
            "warning",
            "pipeline-micro-batches",
            f"{count} micro-batches are fewer than the {ranks * local} stages: {says}",
            where=where,
            why="there is never work for all stages at the same time",
            fix=f"micro_batches: {4 * ranks} or more, and a batch that it divides",
        )
        return
    upto = "up to " if requested == "auto" else ""
    yield Finding("info", "pipeline-bubble", f"{config.schedule} with {upto}{count} micro-batches: {says}", where=where)


class MeshStrategy(LightningStrategy):
    """The base of the plugins whose runtime is one device mesh."""

    runtime = "fairlead_strategies.mesh_build:build"
    sharded_state = True
    scales_gradients: ClassVar[bool] = False
    """Whether all gradients are on one mesh, on which torch's gradient scaler finds an overflow of any rank."""
    codes: ClassVar[Mapping[str, str]] = {
        "mesh-checkpoint-io": "`state_dict_type` does not fit `checkpoint_io`.",
        "mesh-layout": "How the ranks are laid out, and which size was worked out from the others.",
        "mesh-offload": "The process group of a run with `cpu_offload` cannot reduce what lies in CPU memory.",
        "mesh-sizes": "The sizes of the mesh do not multiply to the number of ranks.",
        "mesh-tensor-nodes": "The ranks that split each layer lie on several nodes.",
    }

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """What Lightning or torch refuse together with a mesh."""
        yield from self.no_mps_and_xla()
        if not self.scales_gradients:
            reason = "torch's gradient scaler would miss an overflow on another dimension of the mesh"
            yield self.no(("precision.16-mixed",), reason, "precision: bf16-mixed, or strategy: fsdp")
        yield self.no(
            ("precision.64-true", "precision.transformer-engine"),
            "Lightning's ModelParallelStrategy does not take it",
            "precision: bf16-mixed",
        )
        reason = "it keeps weights in a form that cannot be sharded"
        yield self.no(("precision.bitsandbytes",), reason, "precision: 32-true, bf16-mixed or bf16-true")

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """Sizes and fields that do not fit the rest of the run."""
        config = resolution.strategy
        assert isinstance(config, MeshStrategyConfig)
        try:
            layout = config.layout(resolution.world_size, resolution.num_nodes)
        except ConfigError as error:
            yield Finding.of(error, "error", "mesh-sizes", where=error.where or "trainer.strategy")
            return
        if layout.expert > 1 or (layout.auto is not None and len(layout.dimensions()) > 1):
            yield Finding("info", "mesh-layout", f"mesh: {layout.explained()}", where="trainer.strategy")
        for name in ("pipeline", "expert"):
            old = too_old(name, where=f"trainer.strategy.{name}") if getattr(layout, name) > 1 else None
            if old is not None:
                yield Finding.of(old, "error", "engine-too-old")
        yield from self.tensor_nodes(layout, resolution)
        yield from checkpoint_findings(config, resolution)
        if config.cpu_offload and resolution.device_type != "cpu" and "gloo" not in resolution.backend:
            yield Finding(
                "error",
                "mesh-offload",
                f"the backend {resolution.backend!r} cannot reduce what lies in CPU memory",
                where="trainer.strategy.process_group_backend",
                why="with cpu_offload the gradients are on the CPU when their norm is computed",
                fix=f'process_group_backend: "cpu:gloo,{resolution.device_type}:{resolution.backend}"',
            )

    def tensor_nodes(self, layout: Layout, resolution: Resolution) -> Iterator[Finding]:
        """Where the ranks of a tensor group lie on several nodes."""
        if resolution.num_nodes > 1 and resolution.devices % layout.tensor:
            yield Finding(
                "warning",
                "mesh-tensor-nodes",
                f"tensor {layout.tensor} over nodes of {resolution.devices} devices",
                where="trainer.strategy.tensor",
                why="the ranks that split each layer exchange activations several times in it, here over the network",
                fix=f"tensor: {resolution.devices} or a divisor of it, and the rest for shard or replicate",
            )

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterator[Inexact]:
        """Shown on CPUs with full checkpoints: a unit always reduces the same gradients together."""
        config = resolution.strategy
        assert isinstance(config, MeshStrategyConfig)
        doubts = {
            "state_dict_type: sharded": (
                config.state_dict_type == "sharded" and not resolution.checkpoint_io.saves_shards
            ),
            f"{resolution.world_size} ranks over {resolution.backend}": resolution.backend != "gloo"
            and resolution.world_size > 2,
        }
        for what, doubtful in doubts.items():
            if doubtful:
                yield Inexact(
                    f"strategy: {config.name} with {what}",
                    why="no test has resumed that",
                    fix="accelerator: cpu, and the default state_dict_type, where it matters",
                    certain=False,
                )


def checkpoint_findings(config: MeshStrategyConfig, resolution: Resolution) -> Iterator[Finding]:
    """Whether shards or a full checkpoint can be saved as configured."""
    takes_shards, name = resolution.checkpoint_io.saves_shards, resolution.checkpoint_io.name
    where = "trainer.strategy.state_dict_type"
    if config.state_dict_type == "sharded" and not takes_shards:
        yield Finding(
            "warning",
            "mesh-checkpoint-io",
            f"checkpoint_io {name!r} does not write the checkpoints, it only commits them",
            where=where,
            why="Lightning has every rank write its own part of a sharded checkpoint, and the training waits",
            fix="checkpoint_io: distributed",
        )
    if config.state_dict_type == "full" and takes_shards:
        yield Finding(
            "error",
            "mesh-checkpoint-io",
            f"checkpoint_io {name!r} writes the part of each rank, but rank 0 would gather all of it",
            where=where,
            fix="leave state_dict_type out, or use checkpoint_io: torch",
        )


class FSDP2StrategyConfig(ReshardField):
    """Fully sharded data parallel with torch's `fully_shard`, on GPUs and CPUs.

    A module is sharded here: its blocks, then the rest of it. One that parallelises itself in `configure_model` is left
    as it is, but for parameters that it leaves out. `hybrid` also splits layers, sequences and stages.

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


class TensorParallelStrategyConfig(TensorPlanConfig):
    """Each layer is split over `tensor` ranks, alone or in several copies of the model.

    Example:
        >>> config = TensorParallelStrategyConfig(tensor=2, plan={"*.up": "colwise", "*.down": "rowwise"})
        >>> str(TensorParallelStrategyConfig(tensor=2, replicate="auto").layout(4))
        'replicate 2 x tensor 2'
    """

    name: Literal["tensor_parallel"] = "tensor_parallel"
    tensor: SizeOrAuto = "auto"
    """Ranks that split each layer; `auto` is what the number of ranks leaves. No more than a node has."""
    replicate: SizeOrAuto = Field(1)
    """Replicas of the split model, each with its own batches; their gradients are averaged."""


class TensorParallel(MeshStrategy):
    """Tensor parallelism."""

    config = TensorParallelStrategyConfig


tensor_parallel = TensorParallel()


class PipelineParallelStrategyConfig(PipelineFields):
    """The layers are split over the ranks, which work on parts of each batch at the same time.

    The module says which layers follow each other, and what the loss of an output is: see the how-to page on pipelines.

    Example:
        >>> config = PipelineParallelStrategyConfig(schedule="interleaved_1f1b", micro_batches=16)
        >>> str(config.layout(4)), config.local_stages
        ('pipeline 4', 2)
    """

    name: Literal["pipeline_parallel"] = "pipeline_parallel"
    pipeline: SizeOrAuto = "auto"
    """Ranks of one pipeline; `auto` is what the number of ranks leaves."""
    replicate: SizeOrAuto = 1
    """Data-parallel pipelines, each with its own batches; their gradients are averaged."""


class PipelineParallel(MeshStrategy):
    """Pipeline parallelism on torch's schedules."""

    config = PipelineParallelStrategyConfig
    codes: ClassVar[Mapping[str, str]] = {**MeshStrategy.codes, **CODES}

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """What does not go together with stages."""
        yield from super().fairlead_capabilities()
        reason = "layers of different stages see different micro-batches, and there is nothing to synchronise"
        yield self.no(("layer_sync.torch_sync_batchnorm",), reason, "leave layer_sync out")

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """Sizes, then the schedule."""
        findings = list(super().fairlead_check(resolution, environ))
        yield from findings
        config = resolution.strategy
        assert isinstance(config, PipelineParallelStrategyConfig)
        if any(finding.code == "mesh-sizes" for finding in findings):
            return
        layout = config.layout(resolution.world_size, resolution.num_nodes)
        if layout.pipeline == 1:
            yield Finding(
                "error",
                "pipeline-alone",
                f"a pipeline of 1 rank, in {resolution.world_size}",
                where="trainer.strategy.pipeline",
                why="there is no second stage",
                fix="devices: 2 or more, or strategy: ddp",
            )
        yield from pipeline_findings(config, layout, resolution)

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterator[Inexact]:
        """Shown on CPUs: messages between two ranks have no order that could change."""
        yield from super().fairlead_exactness(resolution)


pipeline_parallel = PipelineParallel()


class HybridStrategyConfig(PipelineFields, ExpertFields, ContextFields, TensorPlanConfig):
    """Copies, shards, split sequences, split layers and stages of a model, in any combination; and divided experts.

    The sizes multiply to the number of ranks; one may be `auto`. `expert` is no factor: its ranks are those of `shard`.

    Example:
        >>> HybridStrategyConfig(tensor=2).layout(8).explained()
        'shard 4 x tensor 2, with shard: auto = 8 ranks / (tensor 2) = 4'
        >>> HybridStrategyConfig(expert=2).layout(4).explained()
        'shard 4 (expert 2), with shard: auto = 4 ranks = 4'
    """

    name: Literal["hybrid"] = "hybrid"
    pipeline: SizeOrAuto = 1
    """Pipeline stages, each on its own ranks; the outermost dimension, because it communicates least."""
    replicate: SizeOrAuto = 1
    """Replicas of the sharded and split model; gradients are averaged over them."""
    shard: SizeOrAuto = "auto"
    """Ranks that share the shards of parameters, gradients and optimizer state."""
    context: SizeOrAuto = 1
    """Ranks that share each sequence: the module is called with full sequences, and each rank computes its tokens. The
    loss must be a mean over all tokens."""
    tensor: SizeOrAuto = 1
    """Ranks that split each layer; the innermost dimension, because it communicates most."""


class Hybrid(MeshStrategy):
    """Several ways to split a model at once."""

    config = HybridStrategyConfig
    codes: ClassVar[Mapping[str, str]] = {
        **MeshStrategy.codes,
        **CODES,
        "hybrid-expert": "What divided experts are not combined with.",
    }

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """What every mesh checks, the schedule of a pipeline, where there is one, and what is not built."""
        findings = list(super().fairlead_check(resolution, environ))
        yield from findings
        config = resolution.strategy
        assert isinstance(config, HybridStrategyConfig)
        if not any(finding.code == "mesh-sizes" for finding in findings):
            layout = config.layout(resolution.world_size, resolution.num_nodes)
            yield from pipeline_findings(config, layout, resolution)
            yield from expert_findings(config, layout)


def expert_findings(config: HybridStrategyConfig, layout: Layout) -> Iterator[Finding]:
    """What divided experts are not combined with; with what works instead."""
    if layout.expert > 1 and layout.tensor > 1 and config.sequence_parallel:
        yield Finding(
            "error",
            "hybrid-expert",
            f"expert {layout.expert} with sequence_parallel: a mixture is to get full sequences",
            where="trainer.strategy.sequence_parallel",
            why="between the blocks each rank of `tensor` has other tokens, and the router would learn of a part",
            fix="sequence_parallel: false; each rank of `tensor` sends a part of the tokens to the experts anyway",
        )


hybrid = Hybrid()
