"""What every plugin of every axis keeps to, as a class of tests."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import unittest
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ValidationError

from fairlead import yaml
from fairlead.config_bases import BackendConfig
from fairlead.configs import config_classes
from fairlead.contract import broken_capability
from fairlead.errors import FairleadError
from fairlead.findings import CODES, Finding
from fairlead.interfaces import BuildContext
from fairlead.open_union import parse_backend
from fairlead.plugin_classes import Plugin
from fairlead.plugins import EntryPoint, PluginManager
from fairlead.testing.fakes import FakeEnviron
from fairlead.testing.resolutions import minimal_resolution

HEAVY = ("torch", "lightning", "pytorch_lightning", "numpy")
"""What a plugin and its config may not import: a login node has none of it, and each costs seconds."""

_KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def skip(reason: str) -> None:
    """Ends a test that cannot be done here."""
    raise unittest.SkipTest(reason)  # pytest takes it as its own


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
        """A new plugin manager, which knows the plugin."""
        found = PluginManager(self.entry_points)
        assert self.plugin_name in found.names(self.axis), self.broken(
            "no installed package has an entry point of this name in the group fairlead",
            "pip install -e . ; the name is in [project.entry-points.fairlead] of pyproject.toml",
        )
        return found

    @property
    def key(self) -> str:
        """The entry point's name."""
        return f"{self.axis}.{self.plugin_name}"

    def broken(self, what: str, do: str) -> str:
        """The message of a test that fails: what is wrong, and what the author should do."""
        return f"{self.key}: {what}\n  do: {do}"

    def test_is_found_and_loads(self) -> None:
        """The entry point is named `<axis>.<tag>`, and the manager has nothing to say against what it loads."""
        records = {record.key: record for record in self.plugins().records(self.axis, load=True)}
        error = records[self.key].error
        assert error is None, self.broken(str(error), "change the plugin's class or its entry point so that this holds")

    def test_loading_imports_no_engine(self) -> None:
        """Loading it works without torch, Lightning and NumPy."""
        module = self.plugins().record(self.axis, self.plugin_name).value.partition(":")[0]
        self.imports_no_engine(module, "import them in the body of what builds, as `runtime` names it")

    def imports_no_engine(self, module: str, do: str) -> None:
        """A new process that imports the module has none of the heavy packages."""
        script = f"import {module}\nimport sys, json\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, self.broken(
            f"{module} cannot be imported alone:\n{done.stderr}", "make it importable in a new process"
        )
        imported = json.loads(done.stdout.splitlines()[-1])
        assert not imported, self.broken(f"importing {module} imports {', '.join(imported)}", do)

    def require_engines(self) -> None:
        """Skips the test when what the runtime needs is not installed."""
        record = {r.key: r for r in self.plugins().records(self.axis, load=True)}[self.key]
        if record.missing:
            skip(f"{self.key}: the engine is not installed: {', '.join(record.missing)}")

    def load_reference(self, reference: str | None, what: str) -> Any:
        """What a `module:callable` names."""
        assert reference, self.broken(f"`{what}` is not set", f'set `{what} = "module:callable"`')
        module, _, name = reference.partition(":")
        found = getattr(importlib.import_module(module), name, None)
        assert callable(found), self.broken(
            f"`{what}` names {reference!r}, which is not callable", f"name a function or class in {module}"
        )
        return found


class PluginConformance(EntryPointConformance):
    """The suite that each axis extends.

    Attributes:
        example: Fields that the config cannot do without, if there are any; None: the plugin's own `example`.
        trainer: Fields of `TrainerConfig` that the plugin needs to be tried, besides itself.
        example_environ: The environment variables to try it with; None: the plugin's own `example_environ`.
        builds: For each engine, the class that the runtime must return, as `module:Class`.
    """

    example: ClassVar[Mapping[str, Any] | None] = None
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
        plugins = plugins or self.plugins()
        example = self.plugin(plugins).example if self.example is None else self.example
        return parse_backend(self.axis, {"name": self.plugin_name, **example}, plugins)

    def environ(self, plugins: PluginManager | None = None) -> dict[str, str]:
        """The environment variables to try it with."""
        given = self.plugin(plugins).example_environ if self.example_environ is None else self.example_environ
        return dict(given or {})

    def implements(self, plugins: PluginManager, hook: str) -> bool:
        """Whether the plugin has this hook."""
        return getattr(self.plugin(plugins), hook, None) is not None

    def answers(self, hook: str, kind: type, variables: Mapping[str, str] | None = None, **given: Any) -> list[Any]:
        """What a hook of the plugin says of these variables, or those of its example: each of this kind."""
        plugins = self.plugins()
        environ = FakeEnviron(self.environ(plugins) if variables is None else variables)
        answers = plugins.call(self.plugin(plugins), hook, environ=environ, **given)
        for one in answers:
            assert isinstance(one, kind), self.broken(
                f"{hook} gave a {type(one).__name__}", f"return a fairlead.{kind.__name__}, or None"
            )
        return answers

    def resolution(self, plugins: PluginManager, config: BackendConfig) -> Any:
        """One rank on the CPU with this plugin selected."""
        chosen: Any = (config,) if self.axis == "logger" else config
        field = {"logger": "loggers"}.get(self.axis, self.axis)
        own = {} if self.axis == "submitter" else {field: chosen}  # which is no setting of the trainer
        return minimal_resolution(plugins, environ=self.environ(plugins), **{**self.trainer, **own})

    # -- the config

    def test_config_constructs(self) -> None:
        """The config needs no fields but those of `example`, and a preset sets what it says."""
        plugin, config = self.plugin(), self.config()
        assert isinstance(config, plugin.base), self.broken(
            f"its config is not a {plugin.base.__name__}", "derive the config from that class"
        )
        parsed = parse_backend(self.axis, config.model_dump(mode="json"), self.plugins())
        assert parsed == config, self.broken(
            f"the preset {dict(plugin.preset)} does not survive validation",
            "give the preset values as a config holds them",
        )

    def test_config_is_frozen(self) -> None:
        """A config cannot be changed, so what was checked is what runs."""
        config = self.config()
        try:
            config.__setattr__("name", "another")
        except ValidationError:
            return
        raise AssertionError(self.broken("a field can be set after validation", "keep `frozen=True` of the base"))

    def test_config_forbids_unknown_fields(self) -> None:
        """A misspelt field is an error."""
        kinds: set[str] = set()
        try:
            self.plugin().config.model_validate({**self.config().model_dump(), "no_such_field": 1})
        except ValidationError as error:
            kinds = {detail["type"] for detail in error.errors()}
        assert "extra_forbidden" in kinds, self.broken(
            "unknown fields are accepted", "keep `extra='forbid'` of the base"
        )

    def test_config_round_trips(self) -> None:
        """JSON and YAML give back the same config."""
        config = self.config()
        plain = config.model_dump(mode="json")
        for form, data in (
            ("JSON", json.loads(json.dumps(plain))),
            ("YAML", yaml.load(yaml.dump(plain), source="-").data),
        ):
            back = parse_backend(self.axis, data, self.plugins())
            assert back == config, self.broken(
                f"{form} gives back {back!r}, not {config!r}", "use field types that pydantic reads as it writes them"
            )

    def test_config_has_a_json_schema(self) -> None:
        """`fairlead schema` can show it to editors."""
        schema = self.plugin().config.model_json_schema()
        assert schema["properties"], self.broken(
            "its JSON schema is empty", "give the config at least `name: Literal[...]`"
        )

    def test_every_field_is_documented(self) -> None:
        """The class and each field have a docstring: they are the documentation."""
        config = self.plugin().config
        assert (config.__doc__ or "").strip(), self.broken(
            f"{config.__name__} has no docstring", "say in it what this choice is"
        )
        bare = [name for name, field in config.model_fields.items() if name != "name" and not field.description]
        assert not bare, self.broken(
            f"no docstring under the fields {', '.join(bare)} of {config.__name__}",
            "say what each is, its unit and its default",
        )

    def test_config_is_named_by_its_axis(self) -> None:
        """The class is called `<Name><Axis>Config`, and it and its aliases are found in `fairlead.configs`."""
        plugin, plugins = self.plugin(), self.plugins()
        suffix = plugin.base.__name__.removesuffix("Base")
        name = plugin.config.__name__
        named = any(each.endswith(suffix) for each in (name, *plugin.aliases))
        assert named, self.broken(
            f"{name} should be called <Name>{suffix}", "rename it, or set `aliases` with such a name"
        )
        known = config_classes(plugins)
        for alias in (name, *plugin.aliases):
            assert known.get(alias) is plugin.config, self.broken(
                f"fairlead.configs.{alias} is {known.get(alias)!r}", "choose a name that no other config has"
            )

    # -- what it says

    def test_codes_are_explained(self) -> None:
        """Each code of a finding is in kebab-case and has a sentence, and none is a code of the core's."""
        for code, text in self.plugin().codes.items():
            assert _KEBAB.fullmatch(code), self.broken(
                f"the code {code!r} is not in kebab-case", "write it as `my-code`"
            )
            assert text.strip(), self.broken(f"the code {code!r} has no explanation", "give it a sentence in `codes`")
            assert CODES.get(code, text) == text, self.broken(
                f"the code {code!r} is one of fairlead's own", "choose another, or give it fairlead's explanation"
            )

    def test_capabilities_are_rows(self) -> None:
        """The hook `fairlead_capabilities` gives rows about choices that exist, each with its reason."""
        plugins = self.plugins()
        for result in plugins.call(self.plugin(plugins), "fairlead_capabilities", plugins=plugins):
            for row in result:
                wrong = broken_capability(row, self.key, plugins.tags)
                assert wrong is None, self.broken(str(wrong), "correct the row")

    def test_checks_give_findings(self) -> None:
        """The hook `fairlead_check` gives findings whose codes are explained."""
        plugins = self.plugins()
        plugin, config = self.plugin(plugins), self.config(plugins)
        resolution = self.resolution(plugins, config)
        environ = self.environ(plugins)
        for result in plugins.call(plugin, "fairlead_check", resolution=resolution, environ=environ):
            for finding in result:
                assert isinstance(finding, Finding), self.broken(
                    f"fairlead_check gave a {type(finding).__name__}", "yield fairlead.Finding"
                )
                known = {**CODES, **plugin.codes}
                assert finding.code in known, self.broken(
                    f"the code {finding.code!r} is not in `{plugin!r}.codes`", "explain it there"
                )
        assert environ == self.environ(plugins), self.broken(
            "fairlead_check changed the environment", "work on a copy of `environ`"
        )

    # -- what it builds

    def test_runtime_is_importable(self) -> None:
        """`runtime` names a callable that exists, once its engine is installed."""
        reference = self.plugin().runtime
        assert reference, self.broken("`runtime` is not set", 'set `runtime = "module:callable"`')
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
        environ = self.environ(plugins)
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
        assert isinstance(built, expected), self.broken(
            f"the runtime gave a {type(built).__name__} for the {engine}",
            f"return a {self.builds[engine].partition(':')[2]}",
        )
        return built

    def _skip_what_is_not_for_here(self, plugins: PluginManager, resolution: Any) -> None:
        from fairlead.checks import find_conflicts

        for finding in find_conflicts(resolution, self.environ(plugins), plugins):
            if finding.severity == "error":
                skip(f"{self.key} is not for one rank on this machine: {finding}")
