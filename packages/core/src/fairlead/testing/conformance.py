"""What every plugin of every axis keeps to, as a class of tests."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ValidationError

from fairlead import yaml
from fairlead.capabilities import Capability
from fairlead.config_bases import BackendConfig
from fairlead.configs import config_classes
from fairlead.errors import FairleadError
from fairlead.findings import CODES, Finding
from fairlead.interfaces import BuildContext
from fairlead.open_union import parse_backend
from fairlead.plugin_classes import Plugin
from fairlead.plugins import PluginManager
from fairlead.records import EntryPoint
from fairlead.testing.resolutions import minimal_resolution

HEAVY = ("torch", "lightning", "pytorch_lightning", "numpy")
"""What a plugin and its config may not import: a login node has none of it, and each costs seconds."""

_KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def skip(reason: str) -> None:
    """Ends a test that cannot be done here."""
    import pytest

    pytest.skip(reason)


class EntryPointConformance:
    """What plugins and commands share: they are found, they load, and loading them is cheap.

    Attributes:
        plugin_name: The tag; set it in the subclass.
        entry_points: What to discover from; None: what is installed.
    """

    axis: ClassVar[str]
    plugin_name: ClassVar[str]
    entry_points: ClassVar[Iterable[EntryPoint] | None] = None

    def plugins(self) -> PluginManager:
        """A new plugin manager."""
        return PluginManager(self.entry_points)

    @property
    def key(self) -> str:
        """The entry point's name."""
        return f"{self.axis}.{self.plugin_name}"

    def test_is_found_and_loads(self) -> None:
        """The entry point is named `<axis>.<tag>`, and the manager has nothing to say against what it loads."""
        records = {record.key: record for record in self.plugins().records(self.axis, load=True)}
        assert self.key in records, f"no entry point {self.key!r} in the group fairlead; found: {sorted(records)}"
        error = records[self.key].error
        assert error is None, f"{self.key}: {error}"

    def test_loading_imports_no_engine(self) -> None:
        """Loading it works without torch, Lightning and NumPy."""
        module = self.plugins().record(self.axis, self.plugin_name).value.partition(":")[0]
        imported = self.imports(f"import {module}", module)
        assert not imported, f"{self.key}: importing {module} imports {', '.join(imported)}"

    def imports(self, code: str, module: str) -> list[str]:
        """The heavy packages that a piece of code imports, in a process of its own."""
        script = f"{code}\nimport sys, json\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{self.key}: {module} cannot be imported alone:\n{done.stderr}"
        return list(json.loads(done.stdout.splitlines()[-1]))

    def require_engines(self) -> None:
        """Skips the test when what the runtime needs is not installed."""
        record = {r.key: r for r in self.plugins().records(self.axis, load=True)}[self.key]
        if record.missing:
            skip(f"{self.key}: the engine is not installed: {', '.join(record.missing)}")

    def load_reference(self, reference: str | None, what: str) -> Any:
        """What a `module:callable` names."""
        assert reference, f"{self.key}: `{what}` is not set"
        module, _, name = reference.partition(":")
        found = getattr(importlib.import_module(module), name, None)
        assert callable(found), f"{self.key}: `{what}` names {reference!r}, which is not callable"
        return found


class PluginConformance(EntryPointConformance):
    """The suite that each axis extends.

    Attributes:
        example: Fields that the config cannot do without, if there are any.
        trainer: Fields of `TrainerConfig` that the plugin needs to be tried, besides itself.
        example_environ: The environment variables to try it with.
        builds: For each engine, the class that the runtime must return, as `module:Class`.
    """

    example: ClassVar[Mapping[str, Any]] = {}
    trainer: ClassVar[Mapping[str, Any]] = {}
    example_environ: ClassVar[Mapping[str, str] | None] = None
    builds: ClassVar[Mapping[str, str]] = {}
    may_build_nothing: ClassVar[bool] = False
    """Whether None is a runtime's answer: nothing has to be built."""

    def plugin(self, plugins: PluginManager | None = None) -> Plugin:
        """The plugin."""
        return (plugins or self.plugins()).get(self.axis, self.plugin_name)

    def config(self, plugins: PluginManager | None = None) -> BackendConfig:
        """Its config, as `{name: <tag>, **example}` in a job makes it."""
        value = {"name": self.plugin_name, **self.example}
        return parse_backend(self.axis, value, plugins or self.plugins())

    def resolution(self, plugins: PluginManager, config: BackendConfig) -> Any:
        """One rank on the CPU with this plugin selected."""
        chosen: Any = (config,) if self.axis == "logger" else config
        field = "loggers" if self.axis == "logger" else self.axis
        return minimal_resolution(plugins, environ=self.example_environ, **{**self.trainer, field: chosen})

    # -- the config

    def test_config_constructs(self) -> None:
        """The config needs no fields but those of `example`, and a preset sets what it says."""
        plugin, config = self.plugin(), self.config()
        assert isinstance(config, plugin.base), f"{self.key}: not a {plugin.base.__name__}"
        again = parse_backend(self.axis, config.model_dump(mode="json"), self.plugins())
        assert again == config, f"{self.key}: the preset {dict(plugin.preset)} does not survive validation"

    def test_config_is_frozen(self) -> None:
        """A config cannot be changed, so what was checked is what runs."""
        config = self.config()
        try:
            config.__setattr__("name", "another")
        except ValidationError:
            return
        raise AssertionError(f"{self.key}: a field can be set after validation; keep `frozen=True` of the base")

    def test_config_forbids_unknown_fields(self) -> None:
        """A misspelt field is an error."""
        kinds: set[str] = set()
        try:
            self.plugin().config.model_validate({**self.config().model_dump(), "no_such_field": 1})
        except ValidationError as error:
            kinds = {detail["type"] for detail in error.errors()}
        assert "extra_forbidden" in kinds, f"{self.key}: unknown fields are accepted; keep `extra='forbid'` of the base"

    def test_config_round_trips(self) -> None:
        """JSON and YAML give back the same config."""
        config = self.config()
        plain = config.model_dump(mode="json")
        for form, data in (
            ("JSON", json.loads(json.dumps(plain))),
            ("YAML", yaml.load(yaml.dump(plain), source="-").data),
        ):
            back = parse_backend(self.axis, data, self.plugins())
            assert back == config, f"{self.key}: {form} gives back {back!r}, not {config!r}"

    def test_config_has_a_json_schema(self) -> None:
        """`fairlead schema` can show it to editors."""
        schema = self.plugin().config.model_json_schema()
        assert schema["properties"], f"{self.key}: an empty JSON schema"

    def test_every_field_is_documented(self) -> None:
        """The class and each field have a docstring: they are the documentation."""
        config = self.plugin().config
        assert (config.__doc__ or "").strip(), f"{self.key}: {config.__name__} has no docstring"
        bare = [name for name, field in config.model_fields.items() if name != "name" and not field.description]
        assert not bare, f"{self.key}: no docstring under the fields {', '.join(bare)} of {config.__name__}"

    def test_config_is_named_by_its_axis(self) -> None:
        """The class is called `<Name><Axis>Config`, and it and its aliases are found in `fairlead.configs`."""
        plugin, plugins = self.plugin(), self.plugins()
        suffix = plugin.base.__name__.removesuffix("Base")
        name = plugin.config.__name__
        named = any(each.endswith(suffix) for each in (name, *plugin.aliases))
        assert named, f"{self.key}: {name} should be called <Name>{suffix}, or have such an alias"
        known = config_classes(plugins)
        for alias in (name, *plugin.aliases):
            assert known.get(alias) is plugin.config, f"{self.key}: fairlead.configs.{alias} is {known.get(alias)!r}"

    # -- what it says

    def test_codes_are_explained(self) -> None:
        """Each code of a finding is in kebab-case and has a sentence, and none is a code of the core's."""
        for code, text in self.plugin().codes.items():
            assert _KEBAB.fullmatch(code), f"{self.key}: the code {code!r} is not in kebab-case"
            assert text.strip(), f"{self.key}: the code {code!r} has no explanation"
            assert CODES.get(code, text) == text, f"{self.key}: the code {code!r} is one of fairlead's own"

    def test_capabilities_are_rows(self) -> None:
        """The hook `fairlead_capabilities` gives rows about `axis.tag`, each with its reason."""
        plugins = self.plugins()
        for result in plugins.call(self.plugin(plugins), "fairlead_capabilities", plugins=plugins):
            for row in result:
                assert isinstance(row, Capability), f"fairlead_capabilities of {self.key} gave a {type(row).__name__}"
                assert row.reason.strip(), f"{self.key}: a capability of {row.subject} has no reason"
                for choice in (row.subject, *row.others):
                    assert "." in choice, f"{self.key}: a capability names {choice!r}, not `axis.tag`"

    def test_checks_give_findings(self) -> None:
        """The hook `fairlead_check` gives findings whose codes are explained."""
        plugins = self.plugins()
        plugin, config = self.plugin(plugins), self.config(plugins)
        resolution = self.resolution(plugins, config)
        environ = dict(self.example_environ or {})
        for result in plugins.call(plugin, "fairlead_check", resolution=resolution, environ=environ):
            for finding in result:
                assert isinstance(finding, Finding), f"fairlead_check of {self.key} gave a {type(finding).__name__}"
                known = {**CODES, **plugin.codes}
                assert finding.code in known, f"{self.key}: the code {finding.code!r} is not in `{plugin!r}.codes`"
        assert environ == dict(self.example_environ or {}), f"fairlead_check of {self.key} changed the environment"

    # -- what it builds

    def test_runtime_is_importable(self) -> None:
        """`runtime` names a callable that exists, once its engine is installed."""
        reference = self.plugin().runtime
        assert reference, f"{self.key}: `runtime` is not set"
        self.require_engines()
        self.load_reference(reference, "runtime")

    def test_builds(self, tmp_path: Path) -> None:
        """The runtime gives an object of the axis's class, or says why it cannot."""
        for engine in self.builds:
            self.build(tmp_path / engine, engine)

    def build(self, run_dir: Path, engine: str = "trainer") -> Any:
        """Builds the plugin for one rank on this machine; skips what the machine cannot do."""
        self.require_engines()
        plugins = self.plugins()
        plugin, config = self.plugin(plugins), self.config(plugins)
        resolution = self.resolution(plugins, config)
        self._skip_what_is_not_for_here(plugins, resolution)
        environ = dict(self.example_environ or {})
        run_dir.mkdir(parents=True, exist_ok=True)
        context = BuildContext(resolution, environ, plugins, engine, run_dir)  # type: ignore[arg-type]  # a key of `builds`
        runtime = self.load_reference(plugin.runtime, "runtime")
        try:
            built = runtime(config, context)
        except FairleadError as error:
            skip(f"{self.key} says why it cannot be built here: {error}")
        if built is None and self.may_build_nothing:
            return built
        expected = self.load_reference(self.builds[engine], "builds")
        assert isinstance(built, expected), f"{self.key}: the runtime gave a {type(built).__name__} for the {engine}"
        return built

    def _skip_what_is_not_for_here(self, plugins: PluginManager, resolution: Any) -> None:
        from fairlead.checks import find_conflicts

        for finding in find_conflicts(resolution, self.example_environ or {}, plugins):
            if finding.severity == "error":
                skip(f"{self.key} is not for one rank on this machine: {finding}")
