"""From a resolution to the arguments of Lightning's Trainer and Fabric."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, cast

from fairlead.backends import build_backend
from fairlead.config import ClassSpec, TrainerConfig
from fairlead.config.marks import PassedToLightning, marked
from fairlead.errors import ConfigError
from fairlead.interfaces import BuildContext
from fairlead.plugin_classes import StrategyPlugin
from fairlead.user_code import CodeRoot, instantiate
from fairlead_runs.checkpoint_io import CheckpointCopies

PASSED_ON: Final = tuple(marked(TrainerConfig, PassedToLightning))
"""The fields of `TrainerConfig` that Lightning's Trainer takes under the same name and with the same value."""


def build_plugins(context: BuildContext) -> dict[str, Any]:
    """The arguments `accelerator`, `devices`, `num_nodes`, `strategy` and `plugins` of Trainer or Fabric."""
    resolution = context.resolution
    strategy = build_backend(resolution.strategy, context)
    strategy.name = resolution.strategy.name  # what a `configure_model` asks for
    checkpoint_io = build_backend(resolution.checkpoint_io, context)
    plugins = []
    if context.engine == "trainer":
        plugins.append(checkpoint_io)
    else:
        with suppress(NotImplementedError):  # Fabric's sharded strategies write themselves
            strategy.checkpoint_io = checkpoint_io
            checkpoint_io = None
        if isinstance(checkpoint_io, CheckpointCopies):
            raise ConfigError(
                f"in a custom training loop, {resolution.strategy.name} writes past the checkpoint_io",
                where="trainer.checkpoint_io",
                why="no checkpoint would be copied to the store",
                fix="leave it out, and call fairlead_runs.remote.upload after each save",
            )
    starts_processes = cast("StrategyPlugin", context.plugins.of(resolution.strategy)).starts_processes
    if not starts_processes or resolution.world_size == 1:
        plugins.append(build_backend(resolution.environment, context))
    precision = build_backend(resolution.precision, context)
    if precision is not None:
        plugins.append(precision)
    if resolution.layer_sync is not None and context.engine == "trainer":
        plugins.append(build_backend(resolution.layer_sync, context))
    # A list names devices; processes on a CPU have no names, only a number.
    indices = resolution.device_indices if not resolution.devices_found.unlimited else None
    return {
        "accelerator": build_backend(resolution.accelerator, context),
        "devices": list(indices) if indices is not None else resolution.devices,
        "num_nodes": resolution.num_nodes,
        "strategy": strategy,
        "plugins": plugins,
    }


def trainer_arguments(context: BuildContext, root: CodeRoot) -> dict[str, Any]:
    """All keyword arguments of lightning.pytorch.Trainer but callbacks and loggers of our own."""
    config = context.resolution.trainer
    arguments = {name: getattr(config, name) for name in PASSED_ON}
    arguments |= build_plugins(replace(context, engine="trainer"))
    # A backend may have to be called as well: a precision that converts layers, before a checkpoint is read into them.
    brought = [callback for plugin in arguments["plugins"] for callback in getattr(plugin, "callbacks", ())]
    users = [_instance(spec, root, "callbacks", index) for index, spec in enumerate(config.callbacks)]
    arguments["callbacks"] = [*brought, *users]
    profiler = config.profiler
    arguments["profiler"] = _instance(profiler, root, "profiler") if isinstance(profiler, ClassSpec) else profiler
    # Our own records replace both; `enable_checkpointing` still allows a user's ModelCheckpoint.
    arguments["logger"] = False
    if config.barebones:
        # Lightning refuses what is on by default here.
        arguments |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return arguments | config.lightning_kwargs


def _instance(spec: ClassSpec, root: CodeRoot, *path: str | int) -> Any:
    return instantiate({"class": spec.class_, "args": spec.args}, root, path=("trainer", *path))
