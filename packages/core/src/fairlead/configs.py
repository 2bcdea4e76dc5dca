"""The config classes of every installed plugin, by name; importing one loads only its plugin."""

from __future__ import annotations

from typing import Any

from fairlead.config_bases import AXES, BackendConfig
from fairlead.errors import did_you_mean
from fairlead.plugins import PluginManager, default_plugins


def config_classes(plugins: PluginManager) -> dict[str, type[BackendConfig]]:
    """Every config class of the loadable plugins by its name, and by the aliases its plugin declares."""
    classes: dict[str, type[BackendConfig]] = {}
    for axis in {record.axis for record in plugins.records()} & AXES.keys():
        for plugin in plugins.loaded(axis).values():
            for name in (plugin.config.__name__, *plugin.aliases):
                classes.setdefault(name, plugin.config)
    return classes


def find_config(name: str, plugins: PluginManager) -> type[BackendConfig] | None:
    """The config class of a name, loading only its plugin where the name tells which one that is."""
    folded = name.lower()
    for record in plugins.records():
        likely = record.axis in AXES and folded.startswith(record.name.replace("_", "").replace("-", "").lower())
        if likely and record.axis.replace("_", "") in folded:
            plugin = plugins.loaded_one(record.axis, record.name)
            if plugin and name in (plugin.config.__name__, *plugin.aliases):
                return plugin.config
    return None


def __getattr__(name: str) -> Any:  # a class whose arguments only its own package knows
    if name.startswith("_"):
        raise AttributeError(name)
    found = find_config(name, default_plugins())
    if found is not None:
        return found
    classes = config_classes(default_plugins())
    if name in classes:
        return classes[name]
    near = did_you_mean(name, classes)
    hint = f"; did you mean {near}?" if near else f"; installed: {', '.join(sorted(classes)) or 'none'}"
    raise AttributeError(f"no installed plugin has a config named {name}{hint}")


def __dir__() -> list[str]:
    return sorted(config_classes(default_plugins()))
