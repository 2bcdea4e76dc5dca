"""The parts of a plugin's contract that can be seen without building anything."""

from __future__ import annotations

from fairlead.errors import PluginError
from fairlead.plugin_classes import Plugin
from fairlead.records import PluginRecord


def check_contract(plugin: Plugin, record: PluginRecord, value: str) -> None:
    """Raises `PluginError` where a loaded plugin breaks it.

    Args:
        plugin: The plugin.
        record: What was discovered of it.
        value: `module:object`, for the error.
    """
    config = getattr(plugin, "config", None)
    if not (isinstance(config, type) and issubclass(config, plugin.base)):
        raise PluginError(f"{value}: `config` is {describe(config)}, not a subclass of fairlead.{plugin.base.__name__}")
    field = config.model_fields.get("name")
    if field is None or not isinstance(field.default, str):
        raise PluginError(f"{value}: {config.__name__} has no `name: Literal[...] = ...` with the tag as default")
    if not plugin.preset and plugin.tag != record.name:
        raise PluginError(
            f"{value}: the entry point says {record.name!r}, but {config.__name__}.name is {plugin.tag!r}"
        )
    unknown = set(plugin.preset) - set(config.model_fields)
    if unknown:
        raise PluginError(f"{value}: the preset sets {sorted(unknown)}, which {config.__name__} does not have")
    if plugin.runtime is not None and ":" not in plugin.runtime:
        raise PluginError(f"{value}: `runtime` is {plugin.runtime!r}, not 'module:callable'")


def describe(thing: object) -> str:
    """A value as a message names it: `the class Ring`, `a str`."""
    return f"the class {thing.__qualname__}" if isinstance(thing, type) else f"a {type(thing).__name__}"
