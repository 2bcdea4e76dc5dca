"""From a config to the object it stands for: imports the runtime that its plugin names, and calls it."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable
from typing import Any

from fairlead.config_bases import BackendConfig
from fairlead.engines import requirement
from fairlead.errors import FairleadError, MissingDependencyError, PluginError
from fairlead.interfaces import BuildContext


def build_backend(config: BackendConfig, context: BuildContext) -> Any:
    """What the runtime that a config's plugin names makes of the config; an error in it names the plugin."""
    plugins = context.plugins
    plugins.require_engines(config.axis, config.name, where=f"trainer.{config.axis}")
    plugin = plugins.of(config)
    if plugin.runtime is None:
        raise PluginError(f"the {config.axis} {config.name!r} has no runtime", where=f"trainer.{config.axis}")
    runtime = imported(plugin.runtime, f"the runtime of the {config.axis} {config.name!r}")
    try:
        return runtime(config, context)
    except FairleadError:
        raise
    except Exception as error:
        raise PluginError(
            f"the {config.axis} {config.name!r} could not be built",
            where=f"trainer.{config.axis}",
            why=f"{type(error).__name__}: {error}",
        ) from error


def imported(target: str, what: str) -> Callable[..., Any]:
    """What `module:name` names; an error says what `what` needs."""
    module, _, name = target.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and "." not in missing:
            name = missing.replace("_", "-")
            raise MissingDependencyError(
                f"{what} needs the package {name}, which is not installed",
                where=target,
                why=str(error),
                fix=f"pip install {shlex.quote(requirement(name))}",
            ) from error
        raise PluginError(
            f"{what} cannot be imported",
            where=target,
            why=f"{type(error).__name__}: {error}",
            fix="an engine may have a version that the plugin cannot use: `fairlead check` and `fairlead plugins` tell",
        ) from error
    return found
