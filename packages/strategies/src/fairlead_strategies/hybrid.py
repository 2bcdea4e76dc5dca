"""Several ways to split a model at once, on one mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from fairlead import Finding, Resolution, hookimpl
from fairlead_strategies.layout import Layout, SizeOrAuto
from fairlead_strategies.mesh.fields import ContextFields, ExpertFields, TensorPlanConfig
from fairlead_strategies.mesh.plugin import MeshStrategy
from fairlead_strategies.pipeline.config import PipelineFields
from fairlead_strategies.pipeline.findings import CODES, pipeline_findings


class HybridStrategyConfig(PipelineFields, ExpertFields, ContextFields, TensorPlanConfig):
    """Copies, shards, split sequences, split layers and stages of a model, in any combination; and divided experts.

    The sizes multiply to the number of ranks; one may be `auto`. `expert` is no factor: its ranks are those of `shard`.
    torchtitan's and Accelerate's names of them are accepted too.

    Example:
        >>> HybridStrategyConfig(tensor=2).layout(8).explained()
        'shard 4 x tensor 2, with shard: auto = 8 ranks / (tensor 2) = 4'
        >>> HybridStrategyConfig(expert=2).layout(4).explained()
        'shard 4 (expert 2), with shard: auto = 4 ranks = 4'
    """

    name: Literal["hybrid"] = "hybrid"
    pipeline: SizeOrAuto = 1
    """Stages of layers, each on ranks of its own; outermost, for it sends least."""
    replicate: SizeOrAuto = 1
    """Copies of the sharded and split model; gradients are averaged over them."""
    shard: SizeOrAuto = "auto"
    """Ranks that share the shards of parameters, gradients and optimizer state."""
    context: SizeOrAuto = 1
    """Ranks that share each sequence: the module is called with whole ones, of which each rank computes its tokens. The
    loss is to be a mean over all tokens."""
    tensor: SizeOrAuto = 1
    """Ranks that split each layer; innermost, for it sends most."""


class Hybrid(MeshStrategy):
    """Several ways to split a model at once."""

    config = HybridStrategyConfig
    runtime = "fairlead_strategies.pipeline.build:build"
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
            layout = config.layout(resolution.world_size)
            yield from pipeline_findings(config, layout, resolution)
            yield from expert_findings(layout, resolution)


def expert_findings(layout: Layout, resolution: Resolution) -> Iterator[Finding]:
    """What would be wrong with divided experts; each with what works instead."""
    if layout.expert == 1:
        return
    where, shard = "trainer.strategy", f"shard: {layout.shard}, expert: {layout.expert}"
    if layout.tensor > 1:
        yield Finding(
            "error",
            "hybrid-expert",
            f"expert {layout.expert} with tensor {layout.tensor}: the experts' layers are not split as well",
            where=f"{where}.tensor",
            why="each rank of `tensor` would send the same tokens, and the experts would see them several times",
            fix=f"leave tensor out: shard: {layout.shard * layout.tensor}, expert: {layout.expert}",
        )
    if layout.pipeline > 1:
        yield Finding(
            "error",
            "hybrid-expert",
            f"expert {layout.expert} with pipeline {layout.pipeline}: the stages' experts are not divided",
            where=f"{where}.pipeline",
            why="a pipeline gathers its checkpoints from its stages, and has no place for what some ranks of one hold",
            fix=f"leave pipeline out ({shard}), or expert",
        )
    if resolution.precision.name == "fp8-torchao":
        yield Finding(
            "error",
            "hybrid-expert",
            f"expert {layout.expert} with {resolution.precision.name}: layers in 8 bits take multiples of 16 rows",
            where="trainer.precision",
            why="an expert gets as many tokens as the router sends it, any number",
            fix="precision: bf16-mixed",
        )


hybrid = Hybrid()
