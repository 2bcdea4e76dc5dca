"""The parts of a plugin's contract that can be seen without building anything."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec

from fairlead.capabilities import Capability
from fairlead.config_bases import AXES
from fairlead.errors import did_you_mean
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
    for attribute in ("engines", "aliases", "formats"):
        if isinstance(value := getattr(plugin, attribute, ()), str):
            return f"`{attribute}` is a text, not a tuple of texts: write `{attribute} = ({value!r},)`"
    if plugin.runtime is not None and ":" not in plugin.runtime:
        return f"`runtime` is {plugin.runtime!r}, not 'module:callable'"
    return _misspelt(plugin)


def _misspelt(plugin: Plugin) -> str | None:
    """An attribute that looks like one of the contract's: `engine` would never be read."""
    known = {name for kind in type(plugin).__mro__ if _is_ours(kind) for name in vars(kind) if not name.startswith("_")}
    known |= {name for kind in type(plugin).__mro__ if _is_ours(kind) for name in vars(kind).get("__annotations__", ())}
    own = {name for kind in type(plugin).__mro__ if not _is_ours(kind) and kind is not object for name in vars(kind)}
    for name in sorted(own - known):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if not name.startswith(("_", "fairlead_")) and near and near[0] not in own:
            return f"{type(plugin).__name__} sets `{name}`, which is never read: did you mean `{near[0]}`?"
    return None


def _is_ours(kind: type) -> bool:
    return kind.__module__ == Plugin.__module__


def broken_runtime(plugin: Plugin, is_installed: Callable[[str], bool]) -> str | None:
    """Whether there is the module that `runtime` names; None: there is. Nothing is imported to find it."""
    runtime = plugin.runtime
    if runtime is None or any(vars(kind).get("runtime") == runtime for kind in type(plugin).__mro__ if _is_ours(kind)):
        return None
    missing = _missing_module(runtime.partition(":")[0])
    # Another distribution's module may be absent as an engine is.
    if missing is None or ("." not in missing and not all(is_installed(engine) for engine in plugin.engines)):
        return None
    return f"`runtime` is {runtime!r}, but there is no module {missing!r}"


def _missing_module(name: str) -> str | None:
    """The first part of a dotted module's name that cannot be found."""
    parts = name.split(".")
    path: Iterable[str] | None = None
    for count in range(1, len(parts) + 1):
        full = ".".join(parts[:count])
        if (loaded := sys.modules.get(full)) is not None:
            path = getattr(loaded, "__path__", None)
            continue
        spec = _spec(full, path)
        if spec is None:
            return full
        path = spec.submodule_search_locations
    return None


def _spec(name: str, path: Iterable[str] | None) -> ModuleSpec | None:
    """As `importlib.util.find_spec`, which would import the parents."""
    paths = list(path) if path is not None else None
    for finder in sys.meta_path:
        if (find := getattr(finder, "find_spec", None)) is not None and (spec := find(name, paths)) is not None:
            found: ModuleSpec = spec
            return found
    return None


def broken_capability(row: object, key: str, tags: Callable[[str], Iterable[str]]) -> str | None:
    """What is wrong with one row of the hook `fairlead_capabilities` of the plugin `key`; None: nothing."""
    if not isinstance(row, Capability):
        return f"fairlead_capabilities gave {describe(row)}, not a fairlead.Capability"
    if not row.reason.strip():
        return f"a capability of {row.subject} has no reason"
    if row.support not in ("yes", "partial", "no"):
        return f"a capability of {row.subject} has the support {row.support!r}, not yes, partial or no"
    if isinstance(row.others, str):
        return f"`others` of a capability of {row.subject} is a text, not a tuple of texts"
    axes = {**dict.fromkeys(AXES), "clipping": None}
    for choice in (row.subject, *row.others):
        axis, dot, tag = choice.partition(".")
        if not dot or axis not in axes:
            near = did_you_mean(axis, axes)
            return f"a capability names {choice!r}, not `axis.tag`" + (f": did you mean {near}.{tag}?" if near else "")
        known = {"norm", "value"} if axis == "clipping" else set(tags(axis))
        # A tag that is not installed may be another plugin's; one that nearly is ours is a slip.
        similar = difflib.get_close_matches(tag, known, n=1, cutoff=0.75)
        if tag not in known and similar and choice != key:
            return f"a capability names {choice!r}, which is not installed: did you mean {axis}.{similar[0]}?"
    return None


def describe(thing: object) -> str:
    """A value as a message names it: `the class Ring`, `a str`."""
    return f"the class {thing.__qualname__}" if isinstance(thing, type) else f"a {type(thing).__name__}"
