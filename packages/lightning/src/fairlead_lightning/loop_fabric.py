"""`fabric`: a Lightning Fabric from the same config, for people with their own loop."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import lightning.fabric as lf

from fairlead.backends import build_backend
from fairlead.config import TrainerConfig
from fairlead.interfaces import BuildContext
from fairlead.plugins import PluginManager, default_plugins
from fairlead.validation import as_config
from fairlead_distributed.run.joining import join_process_group
from fairlead_launch.environment import LAUNCHED
from fairlead_lightning.build import build_plugins
from fairlead_lightning.fit import plan


def fabric(
    config: TrainerConfig | Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    plugins: PluginManager | None = None,
) -> lf.Fabric:
    """A Lightning Fabric on the resolved hardware, not launched yet.

    The settings of the loop (max_steps, validation, callbacks) are the caller's own business; of
    the config only the axes are used.

    Args:
        config: How to run, as a config or a mapping of its fields; None: the defaults.
        environ: The environment variables; None: this process's.
        plugins: The plugin manager; None: the plugins installed here.

    Raises:
        ConfigError: The config is wrong, or does not fit this machine or launcher.

    Example:
        >>> from fairlead import TrainerConfig, fabric
        >>> fab = fabric(TrainerConfig(accelerator="cpu", devices=1))  # doctest: +SKIP
        >>> fab.launch()  # doctest: +SKIP
    """
    environ = os.environ if environ is None else environ
    plugins = plugins if plugins is not None else default_plugins()
    config = as_config(TrainerConfig, {} if config is None else config, "fabric", plugins)
    resolution = plan(config, environ=environ, plugins=plugins)
    # A rank that Lightning's launcher started meets the first one in `launch`, as that one does.
    if resolution.environment.name != "lightning" or LAUNCHED in environ:
        join_process_group(resolution, environ)
    context = BuildContext(resolution, environ, plugins, engine="fabric")
    loggers = [build_backend(logger, context) for logger in resolution.loggers]
    return lf.Fabric(**build_plugins(context), loggers=[logger for logger in loggers if logger is not None])
