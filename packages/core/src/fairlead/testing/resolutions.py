"""A small resolution to try a plugin with: one rank on the CPU, and nothing that is not needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fairlead.config import TrainerConfig
from fairlead.config_bases import AXES, BackendConfig
from fairlead.plugins import PluginManager
from fairlead.resolve import Resolution, resolve


def minimal_resolution(
    plugins: PluginManager, *, environ: Mapping[str, str] | None = None, **trainer: Any
) -> Resolution:
    """Resolves a trainer of one rank on this machine.

    Where no plugin is installed for an axis, a config of its base class with the tag of the default
    takes the place, so that a plugin can be tried alone.

    Args:
        plugins: The plugin manager.
        environ: The environment variables; none by default.
        trainer: Fields of `TrainerConfig`, such as `strategy=RingStrategyConfig()`.

    Example:
        >>> from fairlead import PluginManager
        >>> resolution = minimal_resolution(PluginManager([]), max_steps=3)
        >>> resolution.world_size, resolution.strategy.name
        (1, 'single_device')
    """
    fields = {"devices": 1, "num_nodes": 1, **trainer}
    if "accelerator" not in fields and "cpu" in plugins.names("accelerator"):
        fields["accelerator"] = "cpu"
    config = TrainerConfig.model_validate(fields, context={"plugins": plugins})
    resolution = resolve(config, environ=environ or {}, plugins=plugins)
    gaps: dict[str, BackendConfig] = {
        axis: AXES[axis](name=str(setting.value))
        for axis, setting in resolution.settings.items()
        if axis in AXES and getattr(resolution, axis) is None
    }
    return dataclasses.replace(resolution, **gaps)  # type: ignore[arg-type]  # each is of its axis's class
