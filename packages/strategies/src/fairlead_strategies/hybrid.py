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
            yield from expert_findings(config, layout)


def expert_findings(config: HybridStrategyConfig, layout: Layout) -> Iterator[Finding]:
    """What divided experts are not combined with; with what works instead."""
    if layout.expert > 1 and layout.tensor > 1 and config.sequence_parallel:
        yield Finding(
            "error",
            "hybrid-expert",
            f"expert {layout.expert} with sequence_parallel: a mixture is to get whole sequences",
            where="trainer.strategy.sequence_parallel",
            why="between the blocks each rank of `tensor` has other tokens, and the router would learn of a part",
            fix="sequence_parallel: false; each rank of `tensor` sends a part of the tokens to the experts anyway",
        )


hybrid = Hybrid()
