"""Builds the strategy of a mesh that may have stages."""

from __future__ import annotations

from typing import Any

from fairlead.errors import ConfigError
from fairlead.interfaces import BuildContext
from fairlead_strategies.mesh.build import build as build_mesh
from fairlead_strategies.mesh.parallelize import checkpointed_classes, wrap_policy
from fairlead_strategies.pipeline.config import PipelineFields


def build(config: PipelineFields, context: BuildContext) -> Any:
    """The strategy; what the config names is imported already here, before ranks wait for each other.

    Raises:
        ConfigError: The sizes do not multiply to the number of ranks, a class is not found, or it is Fabric that is to
            run the stages.
    """
    layout = config.layout(context.resolution.world_size)
    if layout.pipeline == 1:
        return build_mesh(config, context)
    if context.engine != "trainer":
        raise ConfigError(
            f"pipeline {layout.pipeline}: Fabric cannot run the stages of a pipeline",
            where="trainer.strategy.pipeline",
            why="a custom training loop calls forward and backward itself, and the schedule has to",
            fix="fairlead_distributed.parallel.pipeline.Pipeline, or the Trainer",
        )
    from fairlead_strategies.pipeline.runtime import PipelineStrategy

    wrap_policy(config)
    checkpointed_classes(config)
    return PipelineStrategy(
        config,
        layout,
        save_distributed_checkpoint=False,
        process_group_backend=context.resolution.backend,
        timeout=config.timeout,
    )
