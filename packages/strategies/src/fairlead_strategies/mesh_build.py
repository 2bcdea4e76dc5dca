"""Builds the strategy on a device mesh for either engine."""

from __future__ import annotations

from typing import Any

from fairlead.errors import ConfigError
from fairlead.interfaces import BuildContext
from fairlead_strategies.mesh.config import MeshStrategyConfig, PipelineFields
from fairlead_strategies.mesh.parallelize import checkpointed_classes, wrap_policy


def build(config: MeshStrategyConfig, context: BuildContext) -> Any:
    """The strategy; what the config names is imported already here, before ranks wait for each other.

    Raises:
        ConfigError: The sizes do not multiply to the number of ranks, a class is not found, or it is Fabric that is to
            run the stages of a pipeline.
    """
    wrap_policy(config)
    checkpointed_classes(config)
    layout = config.layout(context.resolution.world_size, context.resolution.num_nodes)
    staged = layout.pipeline > 1
    saves_shards = context.resolution.checkpoint_io.saves_shards
    kwargs: dict[str, Any] = {
        "save_distributed_checkpoint": not staged and (config.state_dict_type == "sharded" or saves_shards),
        "process_group_backend": context.resolution.backend,
        "timeout": config.timeout,
    }
    if isinstance(config, PipelineFields) and staged:
        if context.engine != "trainer":
            raise ConfigError(
                f"pipeline {layout.pipeline}: Fabric cannot run the stages of a pipeline",
                where="trainer.strategy.pipeline",
                why="a custom training loop calls forward and backward itself, and the schedule has to",
                fix="fairlead_distributed.parallel.pipeline.Pipeline, or the Trainer",
            )
        from fairlead_strategies.pipeline.runtime import PipelineStrategy

        return PipelineStrategy(config, layout, **kwargs)
    if context.engine == "trainer":
        from fairlead_strategies.mesh.runtime import MeshStrategy

        return MeshStrategy(config, layout, saves_shards=saves_shards, **kwargs)
    from fairlead_strategies.mesh.fabric import FabricMesh

    return FabricMesh(config, layout, **kwargs)
