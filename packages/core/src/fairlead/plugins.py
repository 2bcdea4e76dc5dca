"""Discover, load, available: the life of a plugin.

*Discovered* is seen in metadata, *loaded* has its torch-free module imported, *available* has its engine installed.
Only what a config selects is loaded; a broken plugin that is not selected is a record with its error.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import pluggy

from fairlead.config_bases import BackendConfig
from fairlead.contract import broken_capability, broken_contract, broken_runtime, describe
from fairlead.engines import ENGINES, requirement, version_findings
from fairlead.engines import requirement as full_requirement
from fairlead.errors import ConfigError, FairleadError, MissingDependencyError, PluginError, did_you_mean
from fairlead.findings import Finding
from fairlead.install import first_party, install_line
from fairlead.plugin_classes import API_VERSION, AXIS_PLUGINS, AnyPlugin, CheckPlugin, CommandPlugin, Plugin

if TYPE_CHECKING:
    from packaging.requirements import Requirement


class Dist(Protocol):
    """What is used of an `importlib.metadata.Distribution`."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def requires(self) -> list[str] | None: ...


class EntryPoint(Protocol):
    """What is used of an `importlib.metadata.EntryPoint`; `fairlead.testing` makes fakes of it."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def value(self) -> str: ...  # noqa: D102
    @property
    def dist(self) -> Dist | None: ...  # noqa: D102
    def load(self) -> Any: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What is known of one entry point: `error` says why it cannot be used, `missing` what its engine needs."""

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

    def with_error(self, error: str) -> PluginRecord:
        """The same record, unusable for this reason."""
        return dataclasses.replace(self, error=error)

    def as_dict(self) -> dict[str, Any]:
        """The record as `fairlead plugins --json` prints it."""
        names = ("axis", "name", "dist", "version", "available", "missing", "error")
        return {name: getattr(self, name) for name in names}


__all__ = ["GROUP", "EntryPoint", "PluginManager", "PluginRecord", "default_plugins"]

GROUP: Final = "fairlead"
"""The entry-point group of all plugins."""


class _Hooks(pluggy.PluginManager):
    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        return None if name.startswith("__") else super().parse_hookimpl_opts(plugin, name)  # to look takes long


class PluginManager:
    """Finds plugins by axis and tag, and loads those that are requested.

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
        self._pluggy = _Hooks("fairlead")
        # By name, as any runtime: hooks speak of a resolution, which is made of configs, which look plugins up here.
        self._pluggy.add_hookspecs(importlib.import_module("fairlead.hookspecs").HookSpecs)
        self._points: dict[str, EntryPoint] = {}
        self._records: dict[str, PluginRecord] = {}
        self._loaded: dict[str, AnyPlugin] = {}
        self._looked: set[str] = set()
        self._installed = Installed()
        self._ours = functools.cache(first_party)  # a checkout reads the source of all packages for it
        self._discover(entry_points)

    # -- discovery

    def _discover(self, entry_points: Iterable[EntryPoint]) -> None:
        # A distribution reads and parses its METADATA file each time its name is read.
        known: dict[int, tuple[str, str]] = {id(None): ("?", "?")}
        for point in entry_points:
            axis, dot, name = point.name.partition(".")
            source = point.dist
            if source is not None and id(source) not in known:
                known[id(source)] = (source.name, source.version)
            dist, version = known[id(source)]
            record = PluginRecord(axis, name, dist, version, point.value)
            if not dot or not name or axis not in AXIS_PLUGINS:
                axes = ", ".join(AXIS_PLUGINS)
                record = record.with_error(f"entry point {point.name!r} is not '<axis>.<tag>' with an axis of: {axes}")
            other = self._records.get(record.key)
            if other is not None:
                if (other.dist, other.value) == (record.dist, record.value):
                    continue  # one dist seen through two entries of sys.path
                dists = " and ".join(sorted({other.dist, record.dist})) or record.dist
                record = record.with_error(f"two plugins are named {record.key!r}: from {dists}; uninstall one of them")
            self._points[record.key] = point
            self._records[record.key] = record

    def records(self, axis: str | None = None, *, load: bool = False) -> list[PluginRecord]:
        """All records, sorted by axis and name; `load` also loads each, so that it shows what is broken or missing."""
        keys = [key for key, record in self._records.items() if axis in (None, record.axis)]
        found = [self._examine(key) if load else self._records[key] for key in keys]
        return sorted(found, key=lambda record: (record.axis, record.name))

    def names(self, axis: str) -> list[str]:
        """The discovered tags of an axis, sorted; nothing is loaded."""
        return sorted(r.name for r in self._records.values() if r.axis == axis)

    # -- loading

    def _try_load(self, key: str) -> AnyPlugin | None:
        """Loads one plugin; an error goes into its record."""
        if key in self._loaded:
            return self._loaded[key]
        record = self._records[key]
        if record.error is not None:
            return None
        point = self._points[key]
        try:
            plugin = self._load(point, record)
        except (Exception, SystemExit) as error:  # a third party's module may do anything; raised on selection
            reason = error.what if isinstance(error, FairleadError) else f"{type(error).__name__}: {error}"
            self._records[key] = record.with_error(reason)
            return None
        self._loaded[key] = plugin
        return plugin

    def _look_for_engines(self, key: str) -> PluginRecord:
        """Loads one plugin and looks for its engines; what is wrong goes into its record."""
        plugin = self._try_load(key)
        if plugin is not None and key not in self._looked:
            self._looked.add(key)
            try:
                missing = tuple(requirement(r) for r in plugin.engines if not self.is_installed(r))
                self._records[key] = dataclasses.replace(self._records[key], missing=missing)
            except PluginError as error:
                del self._loaded[key]
                self._records[key] = self._records[key].with_error(f"`engines`: {error.what}")
        return self._records[key]

    def _examine(self, key: str) -> PluginRecord:
        """Loads one plugin, looks for its engines, its runtime and its rows of the capability table."""
        record, plugin = self._look_for_engines(key), self._loaded.get(key)
        if isinstance(plugin, Plugin) and not plugin.preset:
            try:
                wrong = broken_runtime(plugin, self.is_installed)
                rows = [row for result in self.call(plugin, "fairlead_capabilities", plugins=self) for row in result]
                wrong = wrong or next(filter(None, (broken_capability(row, key, self.tags) for row in rows)), None)
            except (PluginError, TypeError) as error:
                wrong = f"fairlead_capabilities: {error}"
            if wrong is not None:
                record = self._records[key] = record.with_error(wrong)
        return record

    def tags(self, axis: str) -> list[str]:
        """Those of an axis that are installed or our own."""
        return [*self.names(axis), *(key.partition(".")[2] for key in self._ours() if key.startswith(f"{axis}."))]

    def _load(self, point: EntryPoint, record: PluginRecord) -> AnyPlugin:
        self._installed.check_dist(point)
        plugin: Any = point.load()
        expected = AXIS_PLUGINS[record.axis]
        if not isinstance(plugin, expected):
            raise PluginError(
                f"{point.value} is {describe(plugin)}, but the axis {record.axis!r} needs an instance of "
                f"fairlead.{expected.__name__}"
            )
        if plugin.api != API_VERSION:
            raise PluginError(
                f"{point.value} was written for version {plugin.api} of the plugin contract; "
                f"this fairlead has version {API_VERSION}"
            )
        if isinstance(plugin, Plugin) and (broken := broken_contract(plugin, record.name)):
            raise PluginError(f"{point.value}: {broken}")
        self._register(plugin, record)
        return plugin

    def _register(self, plugin: AnyPlugin, record: PluginRecord) -> None:
        if (name := self._pluggy.get_name(plugin)) is not None:
            raise PluginError(f"{record.value} is the plugin {name!r} itself; register an instance of its own")
        try:
            self._pluggy.register(plugin, name=record.key)
            self._pluggy.check_pending()
        except pluggy.PluginValidationError:
            # It stays half registered otherwise, and would be rejected with every later plugin.
            if self._pluggy.is_registered(plugin):
                self._pluggy.unregister(plugin)
            raise

    def is_installed(self, requirement: str) -> bool:
        """Whether a requirement such as `horovod>=0.28` is met, by metadata alone.

        The bare name of an engine in `fairlead.engines` means the versions that this table accepts.
        """
        return self._installed.meets(requirement)

    def version(self, dist: str) -> str | None:
        """The version of an installed distribution; None: it is not installed."""
        return self._installed.version(dist)

    # -- selection

    def get(self, axis: str, name: str, *, where: str | None = None) -> Plugin:
        """The plugin of a tag, loaded; `where` is the config path to name in an error.

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

    def check(self, name: str) -> CheckPlugin:
        """The check of a name, loaded; raises as `get` does."""
        plugin = self._get("check", name, None)
        assert isinstance(plugin, CheckPlugin)
        return plugin

    def _get(self, axis: str, name: str, where: str | None) -> AnyPlugin:
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
                fix=f"fix or uninstall it (pip uninstall {record.dist}), or choose another {axis}",
            )
        return plugin

    def _unknown(self, axis: str, name: str, where: str | None) -> FairleadError:
        extra = self._ours().get(f"{axis}.{name}")
        if extra is not None:
            return MissingDependencyError(f"the {axis} {name!r} is not installed", where=where, fix=install_line(extra))
        names = self.names(axis)
        near = did_you_mean(name, self.tags(axis))
        installed = f"installed: {', '.join(names)}" if names else f"no plugin of the axis {axis!r} is installed"
        return ConfigError(
            f"unknown {axis} {name!r}",
            where=where,
            why=installed,
            fix=f"did you mean {near!r}?" if near else "choose one of those, or install the package that has it",
        )

    def loaded(self, axis: str) -> dict[str, Plugin]:
        """All plugins of an axis that can be loaded, by tag; broken ones are left to their records."""
        found = {name: self.loaded_one(axis, name) for name in self.names(axis)}
        return {name: plugin for name, plugin in found.items() if plugin is not None}

    def loaded_one(self, axis: str, name: str) -> Plugin | None:
        """One discovered plugin, or None when it cannot be loaded."""
        plugin = self._try_load(f"{axis}.{name}")
        return plugin if isinstance(plugin, Plugin) else None

    def record(self, axis: str, name: str) -> PluginRecord:
        """The record of a discovered plugin; a `KeyError` for any other."""
        return self._records[f"{axis}.{name}"]

    def of(self, config: BackendConfig) -> Plugin:
        """The plugin whose config class made this config."""
        return self.get(config.axis, config.name)

    def label(self, config: BackendConfig) -> str:
        """The shortest way to write a config: the preset whose fields it has, else its tag."""
        candidates = [
            (len(plugin.preset.keys() - {"name"}), name == config.name, "name" not in plugin.preset, len(name), name)
            for name, plugin in self.loaded(config.axis).items()
            if plugin.tag == config.name and all(getattr(config, k, None) == v for k, v in plugin.preset.items())
        ]
        # Of several presets that say the same: the tag ("cuda", not "gpu"), else one that is not only another name
        # ("ddp_fork", not "ddp_notebook"), else the longer name ("bf16-mixed").
        return max(candidates)[-1] if candidates else config.name

    def require_engines(self, axis: str, name: str, *, where: str | None = None) -> None:
        """Raises with the exact pip line when the engine of a selected plugin is not installed."""
        self._get(axis, name, where)
        record = self._look_for_engines(f"{axis}.{name}")
        plugin = self._get(axis, name, where)
        if record.missing:
            raise MissingDependencyError(
                f"the {axis} {name!r} needs {', '.join(record.missing)}",
                where=where,
                why=self._wrong_versions(plugin),
                fix=engines_line(plugin),
            )

    def _wrong_versions(self, plugin: AnyPlugin) -> str | None:
        """Which engines are installed in a version that is not accepted; None: those that are missing are absent."""
        found = []
        for name in plugin.engines:
            version = self.version(name) if name in ENGINES and not self.is_installed(name) else None
            if version is not None:
                found.append(f"{name} {version} is installed. {ENGINES[name].why}".rstrip())
        return "\n".join(found) or None

    def version_findings(self, selected: Iterable[tuple[str, str, str]]) -> list[Finding]:
        """Findings on the versions of the engines of selected plugins, `(axis, name, where)` each."""
        first: dict[str, tuple[str, str, str]] = {}
        for axis, name, where in selected:
            plugin = self._try_load(f"{axis}.{name}")
            for engine in plugin.engines if plugin is not None else ():
                version = self.version(engine) if engine in ENGINES else None
                if version is not None and engine not in first and self.is_installed(engine):
                    first[engine] = (engine, version, where)
        return list(version_findings(list(first.values())))

    # -- hooks

    def call(self, plugin: Plugin, hook: str, **arguments: Any) -> list[Any]:
        """What one hook of one plugin gives, a generator as a list; an empty list when it does not implement it.

        Anything it raises but a `FairleadError` becomes a `PluginError`.
        """
        others = [p for p in self._pluggy.get_plugins() if p is not plugin]
        caller = cast("Callable[..., list[Any]]", self._pluggy.subset_hook_caller(hook, others))
        try:
            return [list(one) if isinstance(one, Iterator) else one for one in caller(**arguments)]
        except FairleadError:
            raise
        except Exception as error:
            raise PluginError(
                f"{hook} of {self._pluggy.get_name(plugin) or repr(plugin)} raised {type(error).__name__}",
                why=str(error) or None,
                fix="report it to the plugin's authors; choosing another plugin avoids it",
            ) from error

    def distinct(self, axis: str) -> dict[str, Plugin]:
        """The loadable plugins of an axis by tag, without their presets."""
        found: dict[type[Plugin], tuple[str, Plugin]] = {}
        for name, plugin in self.loaded(axis).items():
            if not plugin.preset:
                found.setdefault(type(plugin), (name, plugin))
        return dict(found.values())


def engines_line(plugin: AnyPlugin) -> str:
    """The command that brings the engines of a plugin."""
    if plugin.extra:
        return install_line(plugin.extra)
    return " ".join(["pip install", *(f"'{requirement(engine)}'" for engine in plugin.engines)])


_default: list[PluginManager] = []


def default_plugins() -> PluginManager:
    """The manager of this Python environment, made on first use by the public functions."""
    if not _default:
        _default.append(PluginManager())
    return _default[0]


class Installed:
    """The distributions of this Python environment; each version is looked up once."""

    def __init__(self) -> None:
        self._versions: dict[str, str | None] = {}

    def version(self, dist: str) -> str | None:
        """The version of a distribution; None: it is not installed."""
        if dist not in self._versions:
            try:
                self._versions[dist] = importlib.metadata.version(dist)
            except importlib.metadata.PackageNotFoundError:
                self._versions[dist] = None
        return self._versions[dist]

    def meets(self, requirement: str) -> bool:
        """Whether an entry of `engines` is met; `PluginError` where the text is neither an engine nor a requirement."""
        parsed = _requirement(full_requirement(requirement))
        if parsed.marker is not None and not parsed.marker.evaluate({"extra": ""}):
            return True  # not needed on this system
        version = self.version(parsed.name)
        return version is not None and parsed.specifier.contains(version, prereleases=True)

    def check_dist(self, point: EntryPoint) -> None:
        """Raises `PluginError` where a plugin's dist needs another fairlead, before it is imported."""
        version = self.version("fairlead")
        for text in (point.dist.requires if point.dist and version else None) or []:
            if not text.lower().startswith("fairlead") or text == f"fairlead=={version}":
                continue  # nothing to parse, which would cost half of what `fairlead --help` takes
            requirement = _requirement(text)
            if requirement.name.lower() == "fairlead" and not self.meets(text):
                raise PluginError(
                    f"needs {requirement.name}{requirement.specifier}, but fairlead {version} is installed"
                )


def _requirement(text: str) -> Requirement:
    # Imported late: `import fairlead` and `fairlead --help` need no requirement read.
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return Requirement(text)
    except InvalidRequirement as error:
        raise PluginError(f"{text!r} is not a requirement such as 'horovod>=0.28'") from error
