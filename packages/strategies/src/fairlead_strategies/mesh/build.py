"""Builds the strategy on a device mesh for either engine."""

from __future__ import annotations

from typing import Any

from fairlead.interfaces import BuildContext
from fairlead_strategies.mesh.config import MeshStrategyConfig
from fairlead_strategies.mesh.parallelize import checkpointed_classes, wrap_policy


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
    if context.engine == "trainer":
        from fairlead_strategies.mesh.runtime import MeshStrategy

        return MeshStrategy(config, layout, saves_shards=saves_shards, **kwargs)
    from fairlead_strategies.mesh.fabric import FabricMesh

    return FabricMesh(config, layout, **kwargs)
