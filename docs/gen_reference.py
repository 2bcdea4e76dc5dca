"""The generated parts of the reference, which come from the code: docstrings of fields, argparse, tables of codes.

`python docs/gen_reference.py` writes them into the pages, between `<!-- generated: NAME -->` and `<!-- end: NAME -->`,
so that they can be read in the repository; a test compares.  The names of the Python API, a marker without an end, are
put in by MkDocs, whose hook this file is.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from fairlead.checks import capability_table
from fairlead.engines import ENGINES, FEATURES
from fairlead.findings import CODES
from fairlead.hookspecs import HookSpecs
from fairlead.install import first_party
from fairlead.plugin_classes import AXIS_PLUGINS, Plugin
from fairlead.plugins import PluginManager
from fairlead_runs.fingerprints import MAY_CHANGE
from fairlead_runs.monitoring import METRICS

sys.path.insert(0, str(Path(__file__).parent.parent))  # MkDocs runs a hook as a file, outside of any package
from docs import compatibility
from docs.field_tables import JOB_MODELS, describe, fields, nested, table, yaml_word

__all__ = ["PARTS", "expand", "first_party_plugins", "models", "on_files", "on_page_markdown", "written"]

MARKER: Final = re.compile(r"^<!-- generated: ([\w-]+) -->$(\n.*?^<!-- end: \1 -->$)?", re.MULTILINE | re.DOTALL)
ROOT: Final = Path(__file__).parent.parent
MEASURED: Final = "reference/measured.md"
NOT_MEASURED: Final = """# Measured

There are no figures in this checkout. `nox -s bench` runs the benchmarks and writes this page;
see `benchmarks/README.md`.
"""


def first_party_plugins() -> PluginManager:
    """The plugins of Fairlead's own packages; others that are installed here do not get into the docs."""
    ours = first_party()
    points = entry_points(group="fairlead")
    return PluginManager(
        [point for point in points if point.name in ours or (point.dist and point.dist.name == "fairlead")]
    )


# -- parts


def _job() -> str:
    parts = []
    for path, model in JOB_MODELS.items():
        heading = f"## `{path}`\n\n" if path else "## The job\n\n"
        parts.append(f"{heading}{describe(model)}\n\n{fields(model)}")
    return "\n\n".join(parts)


def models() -> dict[str, type[BaseModel]]:
    """Every model that the reference documents, by where it is used: a job's own, and each plugin's config."""
    plugins = first_party_plugins()
    axes = [axis for axis in AXIS_PLUGINS if axis != "command"]
    backends = {f"{axis}.{name}": plugin.config for axis in axes for name, plugin in plugins.distinct(axis).items()}
    parts = {f"{name}: {part.__name__}": part for name, config in backends.items() for part in nested(config)}
    return {**JOB_MODELS, **backends, **parts}


def _plugins() -> str:
    manager = first_party_plugins()
    parts = []
    for axis, kind in AXIS_PLUGINS.items():
        if axis == "command" or not issubclass(kind, Plugin):
            continue
        # An explicit id: mkdocs would number a heading that another axis has too.
        parts.append(f"## {axis} {{: #{axis} }}\n\n{describe(kind.base)}")
        loaded = manager.loaded(axis)
        parts += [_plugin(axis, name, plugin, loaded) for name, plugin in manager.distinct(axis).items()]
    return "\n\n".join(parts)


def _plugin(axis: str, name: str, plugin: Plugin, loaded: Mapping[str, Plugin]) -> str:
    lines = [f"### {axis}: {name} {{: #{axis}-{name} }}", "", describe(plugin.config), ""]
    others = {n: p.preset for n, p in loaded.items() if type(p) is type(plugin) and n != name}
    for other, preset in others.items():
        settings = {key: value for key, value in preset.items() if key != "name"}
        said = ", ".join(f"`{key}: {yaml_word(value)}`" for key, value in settings.items())
        lines.append(f"- `{other}` is {f'this with {said}' if said else 'another name of it'}.")
    lines.append(f"- Config class: `{plugin.config.__name__}` in `fairlead.configs`.")
    engines = ", ".join(f"`{engine}`" for engine in plugin.engines)
    if engines:
        extra = f": the extra `{plugin.extra}`" if plugin.extra else ""
        lines.append(f"- Needs {engines}{extra}.")
    if set(plugin.config.model_fields) > {"name"}:
        lines += ["", fields(plugin.config)]
    for part in nested(plugin.config):
        lines += ["", f"**`{part.__name__}`**: {describe(part)}", "", fields(part)]
    return "\n".join(lines)


def _commands() -> str:
    manager = first_party_plugins()
    parts = []
    for name in manager.names("command"):
        command = manager.command(name)
        parser = argparse.ArgumentParser(prog=f"fairlead {name}", add_help=False, allow_abbrev=False)
        module, _, function = command.arguments.partition(":")
        getattr(importlib.import_module(module), function)(parser)
        brought = f"\n\nNeeds the extra `{command.extra}`." if command.extra else ""
        text = command.help[:1].upper() + command.help[1:]
        parts.append(f"### fairlead {name}\n\n{text}.{brought}\n\n{_options(parser)}")
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for inner, one in action.choices.items():
                    told = str(one.description)
                    parts.append(f"#### fairlead {name} {inner}\n\n{told[:1].upper() + told[1:]}.\n\n{_options(one)}")
    return "\n\n".join(parts)


def _options(parser: argparse.ArgumentParser) -> str:
    """How a command is called, and what its options are; a subcommand has its own section."""
    usage = " ".join(parser.format_usage().removeprefix("usage: ").replace("[-h] ", "").split())
    usage = usage.replace(f" {parser.prog}", f"\n{parser.prog}")  # a command may be called in two ways
    shown = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    return f"```text\n{usage}\n```\n\n" + table(("option", "what"), [(_words(each), each.help or "") for each in shown])


def _words(action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if not action.option_strings:
        return f"`{metavar}`"
    value = "" if action.nargs == 0 else f" {metavar}"
    return ", ".join(f"`{option}{value}`" for option in action.option_strings)


def _codes() -> str:
    manager = first_party_plugins()
    rows = [(f"`{code}`", text, "the core") for code, text in CODES.items()]
    makers: dict[tuple[str, str], list[str]] = {}
    for axis in AXIS_PLUGINS:
        for name, plugin in manager.distinct(axis).items() if axis != "command" else ():
            for code, text in plugin.codes.items():
                makers.setdefault((code, text), []).append(f"[{axis}.{name}](plugins.md#{axis}-{name})")
    for name in manager.names("check"):
        for code, text in manager.check(name).codes.items():
            makers.setdefault((code, text), []).append(f"the check `{name}` of every job")
    rows += [(f"`{code}`", text, ", ".join(names)) for (code, text), names in makers.items()]
    return table(("code", "meaning", "made by"), sorted(rows))


def _capabilities() -> str:
    rows, _ = capability_table(first_party_plugins())
    words = {"no": "no: an error", "partial": "partly: a warning", "yes": "yes"}
    return table(
        ("choice", "with", "works", "why", "instead"),
        [
            (f"`{r.subject}`", ", ".join(f"`{o}`" for o in r.others), words[r.support], r.reason, r.fix or "")
            for r in rows
        ],
    )


def _aliases() -> str:
    manager = first_party_plugins()
    rows: dict[str, tuple[str, ...]] = {}
    for axis in AXIS_PLUGINS:
        for name, plugin in manager.distinct(axis).items() if axis != "command" else ():
            for alias in plugin.aliases:
                rows[alias] = (f"`{alias}`", f"`{plugin.config.__name__}`", f"`{axis}: {name}`")
    return table(("their name", "Fairlead's class", "in a job file"), [rows[alias] for alias in sorted(rows)])


def _may_change() -> str:
    return table(("setting", "why"), [(f"`{path}`", reason) for path, reason in MAY_CHANGE.items()])


def _hooks() -> str:
    parts = []
    for name, hook in inspect.getmembers(HookSpecs, inspect.isfunction):
        if name.startswith("fairlead_"):
            signature = str(inspect.signature(hook)).replace("'", "")
            parts.append(f"### {name}\n\n```python\ndef {name}{signature}: ...\n```\n\n{describe(hook)}")
    return "\n\n".join(parts)


def _api(module: str, package: str) -> Callable[[], str]:
    """The public names of a module, for mkdocstrings; read from its source, since torch may not be installed."""

    def part() -> str:
        source = ROOT / "packages" / package / "src" / module.replace(".", "/") / "__init__.py"
        assigned = next(
            node.value
            for node in ast.parse(source.read_text(encoding="utf-8")).body
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        )
        return "\n".join(f"::: {module}.{name}" for name in ast.literal_eval(assigned))

    return part


def _engines() -> str:
    rows = [
        (f"`{one.name}`", f"`{one.accepts}`", " to ".join(dict.fromkeys((one.tested[0], one.tested[-1]))), one.why)
        for one in ENGINES.values()
    ]
    return table(("engine", "accepted", "tested", "why"), rows)


def _features() -> str:
    rows = [(one.title, f"{one.engine} {one.since}", one.why) for one in FEATURES.values()]
    return table(("feature", "needs", "because"), rows)


def _monitoring() -> str:
    rows = [(f"`{one.name}`", f"`{one.prometheus}`", one.text) for one in METRICS]
    return table(("OpenTelemetry", "Prometheus", "what"), rows)


PARTS: Final[Mapping[str, Callable[[], str]]] = {
    "job": _job,
    "plugins": _plugins,
    "commands": _commands,
    "codes": _codes,
    "capabilities": _capabilities,
    "compatibility": lambda: compatibility.markdown(first_party_plugins()),
    "aliases": _aliases,
    "may-change": _may_change,
    "engines": _engines,
    "features": _features,
    "monitoring": _monitoring,
    "hooks": _hooks,
    "testing": _api("fairlead.testing", "core"),
    "commit": _api("fairlead_runs.commit", "runs"),
    "remote": _api("fairlead_runs.remote", "runs"),
    "distributed": _api("fairlead_distributed", "distributed"),
}
"""Every part by its name in a marker."""


def written(markdown: str) -> str:
    """A page as it should be in the repository; an unknown name is a KeyError."""

    def part(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- generated: {name} -->\n{PARTS[name]()}\n<!-- end: {name} -->" if found[2] else found[0]

    return MARKER.sub(part, markdown)


def expand(markdown: str) -> str:
    """A page with all of its markers replaced."""
    return MARKER.sub(lambda match: PARTS[match[1]](), markdown)


# -- MkDocs


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces the markers of a page."""
    return expand(markdown)


def on_files(files: Any, config: Any) -> Any:
    """Adds a page that says what to do where `nox -s bench` has not written the real one."""
    from mkdocs.structure.files import File

    if files.get_file_from_path(MEASURED) is None:
        files.append(File.generated(config, MEASURED, content=NOT_MEASURED))
    return files


if __name__ == "__main__":
    for page in (ROOT / "docs").rglob("*.md"):
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
