"""Discover, load, available: the life of a plugin.

*Discovered* means seen in the metadata of installed distributions: nothing is imported.  *Loaded*
means its plugin module is imported, which is torch-free.  *Available* means that the engine it
needs is installed.  Only what a config selects is loaded; a broken plugin that nobody selects is a
record with its error, and never in the way.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

import pluggy
from packaging.requirements import InvalidRequirement, Requirement

from fairlead.axes import AXIS_PLUGINS, CommandPlugin, Plugin
from fairlead.bases import BackendConfig
from fairlead.errors import ConfigError, FairleadError, MissingDependencyError, PluginError, did_you_mean
from fairlead.first_party import FIRST_PARTY
from fairlead.hookspecs import API_VERSION, HookSpecs

__all__ = ["GROUP", "EntryPoint", "PluginManager", "PluginRecord", "default_plugins"]

GROUP: Final = "fairlead"
"""The entry-point group of all plugins."""


class _Dist(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def requires(self) -> list[str] | None: ...


class EntryPoint(Protocol):
    """What is used of an `importlib.metadata.EntryPoint`; `fairlead.testing` makes fakes of it."""

    @property
    def name(self) -> str: ...
    @property
    def value(self) -> str: ...
    @property
    def dist(self) -> _Dist | None: ...


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What is known of one entry point.

    Args:
        axis: The part of its name before the dot.
        name: The tag, the part after the dot.
        dist: The distribution that installed it.
        version: That distribution's version.
        value: `module:object`.
        error: Why it cannot be used although it is installed; None while nothing is wrong.
        missing: Requirements of its engine that are not installed.
    """

    axis: str
    name: str
    dist: str
    version: str
    value: str
    error: str | None = None
    missing: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The entry point's name, `strategy.ddp`."""
        return f"{self.axis}.{self.name}"

    @property
    def available(self) -> bool:
        """Whether it loads and its engine is installed."""
        return self.error is None and not self.missing

    def as_dict(self) -> dict[str, Any]:
        """The record as `fairlead plugins --json` prints it."""
        return {
            "axis": self.axis,
            "name": self.name,
            "dist": self.dist,
            "version": self.version,
            "available": self.available,
            "missing": list(self.missing),
            "error": self.error,
        }


class PluginManager:
    """Finds plugins by axis and tag, and loads those that are asked for.

    Args:
        entry_points: What to discover from; None reads the metadata of this Python environment.

    Example:
        >>> manager = PluginManager(entry_points=[])
        >>> manager.names("strategy")
        []
    """

    def __init__(self, entry_points: Iterable[EntryPoint] | None = None) -> None:
        if entry_points is None:
            entry_points = cast("Iterable[EntryPoint]", importlib.metadata.entry_points(group=GROUP))
        self._pluggy = pluggy.PluginManager("fairlead")
        self._pluggy.add_hookspecs(HookSpecs)
        self._points: dict[str, EntryPoint] = {}
        self._records: dict[str, PluginRecord] = {}
        self._loaded: dict[str, Plugin | CommandPlugin] = {}
        self._installed: dict[str, str | None] = {}
        self._discover(entry_points)

    # -- discovery

    def _discover(self, entry_points: Iterable[EntryPoint]) -> None:
        for point in entry_points:
            axis, dot, name = point.name.partition(".")
            dist = point.dist.name if point.dist else "?"
            record = PluginRecord(axis, name, dist, point.dist.version if point.dist else "?", point.value)
            if not dot or not name or axis not in AXIS_PLUGINS:
                axes = ", ".join(AXIS_PLUGINS)
                record = _with_error(
                    record, f"entry point {point.name!r} is not '<axis>.<tag>' with an axis of: {axes}"
                )
            other = self._records.get(record.key)
            if other is not None:
                if (other.dist, other.value) == (record.dist, record.value):
                    continue  # one dist seen through two entries of sys.path
                dists = " and ".join(sorted({other.dist, record.dist})) or record.dist
                record = _with_error(
                    record, f"two plugins are named {record.key!r}: from {dists}; uninstall one of them"
                )
            self._points[record.key] = point
            self._records[record.key] = record

    def records(self, axis: str | None = None, *, load: bool = False) -> list[PluginRecord]:
        """All records, sorted by axis and name.

        Args:
            axis: Only this axis.
            load: Also load each, so that what is broken or missing shows in its record.
        """
        for record in list(self._records.values()):
            if load and record.error is None and axis in (None, record.axis):
                self._try_load(record.key)
        found = [r for r in self._records.values() if axis in (None, r.axis)]
        return sorted(found, key=lambda r: (r.axis, r.name))

    def names(self, axis: str) -> list[str]:
        """The discovered tags of an axis, sorted; nothing is loaded."""
        return sorted(r.name for r in self._records.values() if r.axis == axis)

    # -- loading

    def _try_load(self, key: str) -> Plugin | CommandPlugin | None:
        """Loads one plugin; an error goes into its record."""
        if key in self._loaded:
            return self._loaded[key]
        record = self._records[key]
        if record.error is not None:
            return None
        point = self._points[key]
        try:
            plugin = self._load(point, record)
        except Exception as error:  # a third party's module may raise anything; it is kept, and raised on selection
            reason = error.what if isinstance(error, FairleadError) else f"{type(error).__name__}: {error}"
            self._records[key] = _with_error(record, reason)
            return None
        self._loaded[key] = plugin
        missing = tuple(r for r in plugin.engines if not self.is_installed(r))
        self._records[key] = PluginRecord(
            record.axis, record.name, record.dist, record.version, record.value, None, missing
        )
        return plugin

    def _load(self, point: EntryPoint, record: PluginRecord) -> Plugin | CommandPlugin:
        self._check_requirement(point)
        module_name, _, attribute = point.value.partition(":")
        plugin: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            plugin = getattr(plugin, part)
        expected = AXIS_PLUGINS[record.axis]
        if not isinstance(plugin, expected):
            raise PluginError(
                f"{point.value} is {_describe(plugin)}, but the axis {record.axis!r} needs an instance of "
                f"fairlead.{expected.__name__}"
            )
        if plugin.api != API_VERSION:
            raise PluginError(
                f"{point.value} was written for version {plugin.api} of the plugin contract; "
                f"this fairlead has version {API_VERSION}"
            )
        if isinstance(plugin, Plugin):
            _check_plugin(plugin, record, point.value)
        self._pluggy.register(plugin, name=record.key)
        self._pluggy.check_pending()
        return cast("Plugin | CommandPlugin", plugin)

    def _check_requirement(self, point: EntryPoint) -> None:
        """Compares what the dist says it needs of fairlead with what is here, before importing it."""
        for text in (point.dist.requires if point.dist else None) or []:
            requirement = Requirement(text)
            if requirement.name.lower() != "fairlead" or (
                requirement.marker and not requirement.marker.evaluate({"extra": ""})
            ):
                continue
            version = self._version("fairlead")
            if version and not requirement.specifier.contains(version, prereleases=True):
                raise PluginError(
                    f"needs {requirement.name}{requirement.specifier}, but fairlead {version} is installed"
                )

    def is_installed(self, requirement: str) -> bool:
        """Whether a requirement such as `deepspeed>=0.19` is met, by metadata alone."""
        try:
            parsed = Requirement(requirement)
        except InvalidRequirement as error:
            raise PluginError(f"{requirement!r} in a plugin's `engines` is not a requirement") from error
        version = self._version(parsed.name)
        return version is not None and parsed.specifier.contains(version, prereleases=True)

    def _version(self, dist: str) -> str | None:
        if dist not in self._installed:
            try:
                self._installed[dist] = importlib.metadata.version(dist)
            except importlib.metadata.PackageNotFoundError:
                self._installed[dist] = None
        return self._installed[dist]

    # -- selection

    def get(self, axis: str, name: str, *, where: str | None = None) -> Plugin:
        """The plugin of a tag, loaded.

        Args:
            axis: Its axis.
            name: Its tag.
            where: The config path to name in an error.

        Raises:
            ConfigError: There is no such tag.
            MissingDependencyError: It is one of Fairlead's own whose package is not installed.
            PluginError: It is installed, but broken.
        """
        plugin = self._get(axis, name, where)
        assert isinstance(plugin, Plugin)
        return plugin

    def command(self, name: str) -> CommandPlugin:
        """The command of a name, loaded; raises as `get` does."""
        plugin = self._get("command", name, None)
        assert isinstance(plugin, CommandPlugin)
        return plugin

    def _get(self, axis: str, name: str, where: str | None) -> Plugin | CommandPlugin:
        key = f"{axis}.{name}"
        if key not in self._records:
            raise self._unknown(axis, name, where)
        plugin = self._try_load(key)
        if plugin is None:
            record = self._records[key]
            raise PluginError(
                f"the {axis} {name!r} cannot be loaded",
                where=where,
                why=f"{record.dist} {record.version}: {record.error}",
                fix=f"mend or uninstall it (pip uninstall {record.dist}), or choose another {axis}",
            )
        return plugin

    def _unknown(self, axis: str, name: str, where: str | None) -> FairleadError:
        extra = FIRST_PARTY.get(f"{axis}.{name}")
        if extra is not None:
            return MissingDependencyError(
                f"the {axis} {name!r} is not installed", where=where, fix=f"pip install 'fairlead[{extra}]'"
            )
        names = self.names(axis)
        own = [key.partition(".")[2] for key in FIRST_PARTY if key.startswith(f"{axis}.")]
        near = did_you_mean(name, [*names, *own])
        installed = f"installed: {', '.join(names)}" if names else f"no plugin of the axis {axis!r} is installed"
        return ConfigError(
            f"unknown {axis} {name!r}",
            where=where,
            why=installed,
            fix=f"did you mean {near!r}?" if near else "choose one of those, or install the package that brings it",
        )

    def loaded(self, axis: str) -> dict[str, Plugin]:
        """All plugins of an axis that can be loaded, by tag; broken ones are left to their records."""
        found: dict[str, Plugin] = {}
        for name in self.names(axis):
            plugin = self.loaded_one(axis, name)
            if plugin is not None:
                found[name] = plugin
        return found

    def loaded_one(self, axis: str, name: str) -> Plugin | None:
        """One discovered plugin, or None when it cannot be loaded."""
        plugin = self._try_load(f"{axis}.{name}")
        return plugin if isinstance(plugin, Plugin) else None

    def record(self, axis: str, name: str) -> PluginRecord:
        """The record of a discovered plugin.

        Raises:
            KeyError: No such plugin was discovered.
        """
        return self._records[f"{axis}.{name}"]

    def of(self, config: BackendConfig) -> Plugin:
        """The plugin whose config class made this config."""
        return self.get(config.axis, config.name)

    def label(self, config: BackendConfig) -> str:
        """The shortest way to write a config: the preset whose fields it has, else its tag."""
        candidates = [
            (len(plugin.preset), name)
            for name, plugin in self.loaded(config.axis).items()
            if plugin.tag == config.name and all(getattr(config, k, None) == v for k, v in plugin.preset.items())
        ]
        # Of several presets that say the same ("bf16", "bf16-mixed"), the longer name is the clearer one.
        return max(candidates, key=lambda c: (c[0], len(c[1])))[1] if candidates else config.name

    def require_engines(self, axis: str, name: str, *, where: str | None = None) -> None:
        """Raises with the exact pip line when the engine of a selected plugin is not installed."""
        plugin = self._get(axis, name, where)
        record = self._records[f"{axis}.{name}"]
        if record.missing:
            raise MissingDependencyError(
                f"the {axis} {name!r} needs {', '.join(record.missing)}",
                where=where,
                fix=f"pip install {pip_target(plugin)}",
            )

    # -- hooks

    def call(self, plugin: Plugin, hook: str, **arguments: Any) -> list[Any]:
        """Calls one hook of one plugin; an empty list when it does not implement it.

        Raises:
            PluginError: The plugin raised something that is not a `FairleadError`.
        """
        others = [p for p in self._pluggy.get_plugins() if p is not plugin]
        caller = cast("Callable[..., list[Any]]", self._pluggy.subset_hook_caller(hook, others))
        try:
            return caller(**arguments)
        except FairleadError:
            raise
        except Exception as error:
            raise PluginError(
                f"{hook} of {self._pluggy.get_name(plugin) or plugin!r} raised {type(error).__name__}",
                why=str(error) or None,
                fix="report it to the plugin's authors; choosing another plugin avoids it",
            ) from error

    def call_axis(self, axis: str, hook: str, **arguments: Any) -> Iterator[tuple[str, Any]]:
        """Calls one hook of every loadable plugin of an axis; yields (tag, result), presets once."""
        seen: set[type[Plugin]] = set()
        for name, plugin in self.loaded(axis).items():
            if plugin.preset or type(plugin) in seen:
                continue
            seen.add(type(plugin))
            for result in self.call(plugin, hook, **arguments):
                yield name, result


def pip_target(plugin: Plugin | CommandPlugin) -> str:
    """What to `pip install` for the engine of a plugin."""
    if plugin.extra:
        return f"'fairlead[{plugin.extra}]'"
    return " ".join(f"'{requirement}'" for requirement in plugin.engines)


def _check_plugin(plugin: Plugin, record: PluginRecord, value: str) -> None:
    """The parts of the contract that can be seen without building anything."""
    config = getattr(plugin, "config", None)
    if not (isinstance(config, type) and issubclass(config, plugin.base)):
        raise PluginError(
            f"{value}: `config` is {_describe(config)}, not a subclass of fairlead.{plugin.base.__name__}"
        )
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


def _describe(thing: object) -> str:
    return f"the class {thing.__qualname__}" if isinstance(thing, type) else f"a {type(thing).__name__}"


def _with_error(record: PluginRecord, error: str) -> PluginRecord:
    return PluginRecord(record.axis, record.name, record.dist, record.version, record.value, error, record.missing)


_default: list[PluginManager] = []


def default_plugins() -> PluginManager:
    """The manager of this Python environment, made on first use by the public functions."""
    if not _default:
        _default.append(PluginManager())
    return _default[0]
