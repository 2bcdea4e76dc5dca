"""Several ways to split a model at once, on one mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field

from fairlead import Finding, Resolution, hookimpl
from fairlead_strategies.layout import SizeOrAuto
from fairlead_strategies.mesh.fields import ContextFields, TensorPlanConfig
from fairlead_strategies.mesh.plugin import MeshStrategy
from fairlead_strategies.pipeline.config import PipelineFields
from fairlead_strategies.pipeline.findings import CODES, pipeline_findings


class HybridStrategyConfig(PipelineFields, ContextFields, TensorPlanConfig):
    """Copies, shards, split sequences, split layers and stages of a model, in any combination.

    The sizes multiply to the number of ranks; one may be `auto`. torchtitan's and Accelerate's names of them are
    accepted too.

    Example:
        >>> HybridStrategyConfig(tensor=2).layout(8).explained()
        'shard 4 x tensor 2, with shard: auto = 8 ranks / (tensor 2) = 4'
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
    expert: int = Field(1, gt=0)
    """Ranks of `shard` that share the experts of each mixture-of-experts layer. More than 1 is refused so far: a loop
    of your own may divide them (`fairlead_distributed.parallel.expert`), but this strategy could not save them."""


class Hybrid(MeshStrategy):
    """Several ways to split a model at once."""

    config = HybridStrategyConfig
    runtime = "fairlead_strategies.pipeline.build:build"
    codes: ClassVar[Mapping[str, str]] = {
        **MeshStrategy.codes,
        **CODES,
        "hybrid-expert": "Experts are to be divided over ranks, which this strategy does not do.",
    }

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """What every mesh checks, the schedule of a pipeline, where there is one, and what is not built."""
        findings = list(super().fairlead_check(resolution, environ))
        yield from findings
        config = resolution.strategy
        assert isinstance(config, HybridStrategyConfig)
        if not any(finding.code == "mesh-sizes" for finding in findings):
            yield from pipeline_findings(config, config.layout(resolution.world_size), resolution)
        if config.expert > 1:
            yield Finding(
                "error",
                "hybrid-expert",
                f"expert {config.expert}: this strategy does not divide experts",
                where="trainer.strategy.expert",
                why="each rank would hold other parameters, which its checkpoints have no place for",
                fix="leave expert out: `shard` shards the experts as it does all layers",
            )


hybrid = Hybrid()
