"""Pipeline parallelism: each rank holds some of the layers and passes activations on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Literal

from fairlead import Capability, Finding, Resolution, hookimpl
from fairlead.findings import Inexact
from fairlead_strategies.layout import SizeOrAuto
from fairlead_strategies.mesh.plugin import MeshStrategy
from fairlead_strategies.pipeline.config import PipelineFields
from fairlead_strategies.pipeline.findings import CODES, pipeline_findings


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
    runtime = "fairlead_strategies.pipeline.build:build"
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
        layout = config.layout(resolution.world_size)
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
