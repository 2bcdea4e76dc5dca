"""Builds the strategy on a device mesh for either engine."""

from __future__ import annotations

from typing import Any

from fairlead.errors import ConfigError
from fairlead.interfaces import BuildContext
from fairlead_strategies.layout import Layout
from fairlead_strategies.mesh.config import MeshStrategyConfig
from fairlead_strategies.mesh.parallelize import checkpointed_classes, wrap_policy
from fairlead_strategies.pipeline.config import PipelineFields


def build(config: MeshStrategyConfig, context: BuildContext) -> Any:
    """The strategy; what the config names is imported already here, before ranks wait for each other.

    Raises:
        ConfigError: The sizes do not multiply to the number of ranks, or a class is not found.
    """
    wrap_policy(config)
    checkpointed_classes(config)
    layout = config.layout(context.resolution.world_size)
    saves_shards = context.resolution.checkpoint_io.saves_shards
    kwargs: dict[str, Any] = {
        "save_distributed_checkpoint": bool(config.save_distributed_checkpoint) or saves_shards,
        "process_group_backend": context.resolution.backend,
        "timeout": config.timeout,
    }
    if layout.pipeline > 1:
        return _pipeline(config, layout, context, kwargs)
    if context.engine == "trainer":
        from fairlead_strategies.mesh.runtime import MeshStrategy

        return MeshStrategy(config, layout, saves_shards=saves_shards, **kwargs)
    from fairlead_strategies.mesh.fabric import FabricMesh

    return FabricMesh(config, layout, **kwargs)


def _pipeline(config: MeshStrategyConfig, layout: Layout, context: BuildContext, kwargs: dict[str, Any]) -> Any:
    if context.engine != "trainer" or not isinstance(config, PipelineFields):
        raise ConfigError(
            f"pipeline {layout.pipeline}: Fabric cannot run the stages of a pipeline",
            where="trainer.strategy.pipeline",
            why="a loop of your own calls forward and backward itself, and the schedule has to",
            fix="fairlead_distributed.parallel.pipeline.Pipeline, or the Trainer",
        )
    from fairlead_strategies.pipeline.runtime import PipelineStrategy

    return PipelineStrategy(config, layout, **kwargs)
