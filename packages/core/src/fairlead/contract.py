"""The parts of a plugin's contract that can be seen without building anything."""

from __future__ import annotations

from fairlead.plugin_classes import Plugin


def broken_contract(plugin: Plugin, name: str) -> str | None:
    """What a loaded plugin, whose entry point has this tag, breaks of it; None: nothing."""
    config = getattr(plugin, "config", None)
    if not (isinstance(config, type) and issubclass(config, plugin.base)):
        return f"`config` is {describe(config)}, not a subclass of fairlead.{plugin.base.__name__}"
    field = config.model_fields.get("name")
    if field is None or not isinstance(field.default, str):
        return f"{config.__name__} has no `name: Literal[...] = ...` with the tag as default"
    if not plugin.preset and plugin.tag != name:
        return f"the entry point says {name!r}, but {config.__name__}.name is {plugin.tag!r}"
    unknown = set(plugin.preset) - set(config.model_fields)
    if unknown:
        return f"the preset sets {sorted(unknown)}, which {config.__name__} does not have"
    if plugin.runtime is not None and ":" not in plugin.runtime:
        return f"`runtime` is {plugin.runtime!r}, not 'module:callable'"
    return None


def describe(thing: object) -> str:
    """A value as a message names it: `the class Ring`, `a str`."""
    return f"the class {thing.__qualname__}" if isinstance(thing, type) else f"a {type(thing).__name__}"
