"""The generated parts of the reference, as an MkDocs hook: `<!-- generated: NAME -->` in a page becomes the part NAME.

Everything comes from the code: field docstrings, argparse, the tables of codes and capabilities. Nothing is written
to docs/, so nothing can be out of date. `python docs/gen_reference.py NAME` prints one part.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from fairlead.axes import AXIS_PLUGINS, Plugin
from fairlead.bases import BackendConfig
from fairlead.checks import capability_table
from fairlead.config import (
    CheckpointConfig,
    ClassSpec,
    JobConfig,
    ResourcesConfig,
    RunConfig,
    SubmitConfig,
    TrainerConfig,
)
from fairlead.findings import CODES
from fairlead.first_party import FIRST_PARTY
from fairlead.hookspecs import HookSpecs
from fairlead.open_union import OpenUnion
from fairlead.plugins import PluginManager
from fairlead.run.fingerprints import MAY_CHANGE

__all__ = ["PARTS", "expand", "first_party_plugins", "models", "on_files", "on_page_markdown"]

MARKER: Final = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)
MEASURED: Final = "reference/measured.md"
NOT_MEASURED: Final = """# Measured

There are no figures in this checkout. `nox -s bench` runs the benchmarks and writes this page; see `benchmarks/README.md`.
"""
JOB_MODELS: Final[Mapping[str, type[BaseModel]]] = {
    "": JobConfig,
    "run": RunConfig,
    "model": ClassSpec,
    "trainer": TrainerConfig,
    "trainer.checkpoint": CheckpointConfig,
    "resources": ResourcesConfig,
    "submit": SubmitConfig,
}


def first_party_plugins() -> PluginManager:
    """The plugins of Fairlead's own packages; a plugin of another's that is installed here does not get into the docs."""
    from importlib.metadata import entry_points

    return PluginManager([point for point in entry_points(group="fairlead") if _is_ours(point)])


def _is_ours(point: Any) -> bool:
    return point.name in FIRST_PARTY or bool(point.dist and point.dist.name == "fairlead")


# -- text


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows)])


def _doc(thing: object) -> str:
    """A docstring in Markdown: the example as code, an argument list as a list."""
    out: list[str] = []
    fenced, listing = False, False
    for line in inspect.cleandoc(inspect.getdoc(thing) or "").splitlines():
        if re.fullmatch(r"\w+:", line):
            listing = line != "Example:"
            out += [] if line == "Example:" else [f"**{line}**", ""]
            continue
        if line.lstrip().startswith(">>>") and not fenced:
            out += ["", "```pycon"]
            fenced = True
        if fenced:
            out.append(line.strip())
        else:
            out.append(f"- {line.strip()}" if listing and line.startswith("    ") and line[4:5] != " " else line.strip())
    return "\n".join([*out, "```"] if fenced else out).strip()


# -- types as a YAML author sees them


def _open_unions(annotation: Any) -> Iterator[OpenUnion]:
    for part in (*getattr(annotation, "__metadata__", ()), *get_args(annotation)):
        if isinstance(part, OpenUnion):
            yield part
        elif not isinstance(part, (str, int)):
            yield from _open_unions(part)


def _type(field: FieldInfo) -> str:
    unions = [*(part for part in field.metadata if isinstance(part, OpenUnion)), *_open_unions(field.annotation)]
    if unions:
        kind = f"[{unions[0].axis}](plugins.md#{unions[0].axis})"
        if str(field.annotation).startswith("tuple"):
            return f"list of {kind}"
        others = [*(f"`{word}`" for word in unions[0].literals)]
        return " or ".join([kind, *(others or ["null"])])
    metadata = tuple(part for part in field.metadata if part is not None)
    annotated: Any = field.annotation
    for part in metadata:
        from typing import Annotated

        annotated = Annotated[annotated, part]
    return _schema_text(TypeAdapter(annotated).json_schema())


def _schema_text(schema: Mapping[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "$ref" in schema:
        return _named(str(schema["$ref"]).rpartition("/")[2])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(_schema_text(option) for option in schema[key]))
    if "allOf" in schema:
        return _schema_text(schema["allOf"][0])
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{value}`" for value in values)
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        return _named(str(schema.get("title", "mapping")))
    words = {"boolean": "true or false", "object": "mapping", "string": "text", "null": "null", None: "anything"}
    if kind == "array":
        items = schema.get("items") or {}
        return f"list of {_schema_text(items)}" if items else "list"
    if kind in ("integer", "number"):
        return " ".join(["whole number" if kind == "integer" else "number", *_bounds(schema)])
    return "time" if schema.get("format") == "duration" else words.get(kind, str(kind))


def _bounds(schema: Mapping[str, Any]) -> Iterator[str]:
    symbols = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    for key, symbol in symbols.items():
        if key in schema:
            yield f"{symbol} {schema[key]}"


def _named(name: str) -> str:
    linked = {"ClassSpec": "[class](job.md#model)", "CheckpointConfig": "[mapping](job.md#trainercheckpoint)"}
    sections = {kind.__name__: path for path, kind in JOB_MODELS.items()}
    return linked.get(name) or (f"[mapping](job.md#{sections[name]})" if sections.get(name) else f"`{name}`")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return ""
    plain = TypeAdapter(Any).dump_python(value, mode="json")
    words: dict[Any, str] = {None: "null", True: "true", False: "false"}
    return f"`{words[plain] if plain is None or isinstance(plain, bool) else plain or repr(plain)}`"


def _fields(model: type[BaseModel]) -> str:
    """The fields of a model, grouped by the comments in its source."""
    rows: dict[str, list[tuple[str, ...]]] = {}
    groups = _groups(model)
    for name, field in model.model_fields.items():
        if name == "name" and issubclass(model, BackendConfig):
            continue  # the tag, which the heading says
        row = (f"`{field.alias or name}`", _type(field), _default(field), field.description or "")
        rows.setdefault(groups.get(name, ""), []).append(row)
    tables = []
    for group, members in rows.items():
        tables.append((f"**{group}**\n\n" if group else "") + _table(("field", "value", "default", "what"), members))
    return "\n\n".join(tables)


def _groups(model: type[BaseModel]) -> dict[str, str]:
    found, group = {}, ""
    for line in inspect.getsource(model).splitlines():
        if comment := re.fullmatch(r"    # ([A-Z][^#]*)\.", line):
            group = comment[1]
        elif name := re.match(r"    (\w+): ", line):
            found[name[1]] = group
    return found


# -- parts


def _job() -> str:
    parts = []
    for path, model in JOB_MODELS.items():
        heading = f"## `{path}`\n\n" if path else "## The job\n\n"
        parts.append(f"{heading}{_doc(model)}\n\n{_fields(model)}")
    return "\n\n".join(parts)


def models() -> dict[str, type[BaseModel]]:
    """Every model that the reference documents, by where it is used: a job's own, and each plugin's config."""
    plugins = first_party_plugins()
    axes = [axis for axis in AXIS_PLUGINS if axis != "command"]
    backends = {f"{axis}.{name}": plugin.config for axis in axes for name, plugin in plugins.distinct(axis).items()}
    return {**JOB_MODELS, **backends}


def _plugins() -> str:
    manager = first_party_plugins()
    parts = []
    for axis, kind in AXIS_PLUGINS.items():
        if axis == "command" or not issubclass(kind, Plugin):
            continue
        # An explicit id: mkdocs would number a heading that another axis has too.
        parts.append(f"## {axis} {{: #{axis} }}\n\n{_doc(kind.base)}")
        loaded = manager.loaded(axis)
        parts += [_plugin(axis, name, plugin, loaded) for name, plugin in manager.distinct(axis).items()]
    return "\n\n".join(parts)


def _plugin(axis: str, name: str, plugin: Plugin, loaded: Mapping[str, Plugin]) -> str:
    lines = [f"### {axis}: {name} {{: #{axis}-{name} }}", "", _doc(plugin.config), ""]
    others = {n: p.preset for n, p in loaded.items() if type(p) is type(plugin) and n != name}
    for other, preset in others.items():
        settings = {key: value for key, value in preset.items() if key != "name"}
        said = ", ".join(f"`{key}: {_yaml(value)}`" for key, value in settings.items())
        lines.append(f"- `{other}` is {f'this with {said}' if said else 'another name of it'}.")
    lines.append(f"- Config class: `{plugin.config.__name__}` in `fairlead.configs`.")
    engines = ", ".join(f"`{engine}`" for engine in plugin.engines)
    if engines:
        extra = f": `pip install 'fairlead[{plugin.extra}]'`" if plugin.extra else ""
        lines.append(f"- Needs {engines}{extra}.")
    if set(plugin.config.model_fields) > {"name"}:
        lines += ["", _fields(plugin.config)]
    return "\n".join(lines)


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _commands() -> str:
    manager = first_party_plugins()
    parts = []
    for name in manager.names("command"):
        command = manager.command(name)
        parser = argparse.ArgumentParser(prog=f"fairlead {name}", add_help=False, allow_abbrev=False)
        module, _, function = command.arguments.partition(":")
        getattr(importlib.import_module(module), function)(parser)
        rows = [(_words(action), action.help or "") for action in parser._actions]
        usage = re.sub(r"\s*\n\s*(?!fairlead)", " ", parser.format_usage().removeprefix("usage: ")).strip()
        usage = "\n".join(line.strip() for line in usage.splitlines())
        brought = f"\n\nNeeds `pip install 'fairlead[{command.extra}]'`." if command.extra else ""
        text = command.help[:1].upper() + command.help[1:]
        parts.append(f"### fairlead {name}\n\n{text}.{brought}\n\n```text\n{usage}\n```\n\n" + _table(("option", "what"), rows))
    return "\n\n".join(parts)


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
    rows += [(f"`{code}`", text, ", ".join(names)) for (code, text), names in makers.items()]
    return _table(("code", "meaning", "made by"), sorted(rows))


def _capabilities() -> str:
    rows, _ = capability_table(first_party_plugins())
    words = {"no": "no: an error", "partial": "partly: a warning", "yes": "yes"}
    return _table(
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
    return _table(("their name", "Fairlead's class", "in a job file"), [rows[alias] for alias in sorted(rows)])


def _may_change() -> str:
    return _table(("setting", "why"), [(f"`{path}`", reason) for path, reason in MAY_CHANGE.items()])


def _hooks() -> str:
    parts = []
    for name, hook in inspect.getmembers(HookSpecs, inspect.isfunction):
        if name.startswith("fairlead_"):
            parts.append(f"### {name}\n\n```python\ndef {name}{inspect.signature(hook)}\n```\n\n{_doc(hook)}")
    return "\n\n".join(parts)


PARTS: Final[Mapping[str, Callable[[], str]]] = {
    "job": _job,
    "plugins": _plugins,
    "commands": _commands,
    "codes": _codes,
    "capabilities": _capabilities,
    "aliases": _aliases,
    "may-change": _may_change,
    "hooks": _hooks,
}
"""Every part by its name in a marker."""


def expand(markdown: str) -> str:
    """A page with its markers replaced; an unknown name is a KeyError."""
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
    sys.stdout.write(PARTS[sys.argv[1]]() + "\n" if len(sys.argv) > 1 else Path(__file__).name + "\n")
