"""Pydantic models as Markdown tables: each field with what a YAML author may write, its default, its docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any, Final, get_args

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from fairlead.config import (
    CheckpointConfig,
    ClassSpec,
    JobConfig,
    ResourcesConfig,
    RunConfig,
    TrainerConfig,
)
from fairlead.config_bases import BackendConfig
from fairlead.open_union import OpenUnion

__all__ = ["JOB_MODELS", "describe", "fields", "nested", "table", "yaml_word"]

JOB_MODELS: Final[Mapping[str, type[BaseModel]]] = {
    "": JobConfig,
    "run": RunConfig,
    "model": ClassSpec,
    "trainer": TrainerConfig,
    "trainer.checkpoint": CheckpointConfig,
    "resources": ResourcesConfig,
}
"""The models of a job, by the section that each one is."""


# -- text


def _cell(text: str) -> str:
    return " ".join(_plain(text).split()).replace("|", "\\|")


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows)])


def describe(thing: object) -> str:
    """A docstring in Markdown, without its examples and requirement numbers; what is listed becomes a list."""
    text = re.split(r"^Examples?:", inspect.cleandoc(inspect.getdoc(thing) or ""), flags=re.MULTILINE)[0]
    out: list[str] = []
    listing = False
    for line in _plain(text).splitlines():
        if re.fullmatch(r"(Args|Attributes|Raises|Returns):", line):
            listing = True
            out += [f"**{line}**", ""]
        else:
            out.append(f"- {line.strip()}" if listing and re.match(r" {4}\S", line) else line.strip())
    return "\n".join(out).strip()


def _plain(text: str) -> str:
    """Text for users: requirement numbers are for those who trace them through the code."""
    return re.sub(r"\s*\(R\d+(?:(?:, | to | and )R\d+)*\)", "", text)


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
    section = next(
        (part for part in (field.annotation, *get_args(field.annotation)) if part in JOB_MODELS.values()), None
    )
    if section is not None and section is not ClassSpec:  # its schema holds every plugin's, only to be named here
        return _named(section.__name__) + (" or null" if type(None) in get_args(field.annotation) else "")
    annotated: Any = field.annotation
    for part in field.metadata:
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
        return ", ".join(f"`{yaml_word(value)}`" for value in values)
    kind = schema.get("type")
    if isinstance(kind, list):
        return " or ".join(_schema_text({**schema, "type": each}) for each in kind)
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
    if "minimum" in schema and "maximum" in schema:
        yield f"from {schema['minimum']:g} to {schema['maximum']:g}"
        return
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
    plain = str(value) if isinstance(value, timedelta) else TypeAdapter(Any).dump_python(value, mode="json")
    words: dict[Any, str] = {None: "null", True: "true", False: "false"}
    return f"`{words[plain] if plain is None or isinstance(plain, bool) else plain or repr(plain)}`"


def fields(model: type[BaseModel]) -> str:
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
        tables.append((f"**{group}**\n\n" if group else "") + table(("field", "value", "default", "what"), members))
    return "\n\n".join(tables)


def _groups(model: type[BaseModel]) -> dict[str, str]:
    found, group = {}, ""
    for line in inspect.getsource(model).splitlines():
        if comment := re.fullmatch(r"    # ([A-Z][^#]*)\.", line):
            group = comment[1]
        elif name := re.match(r"    (\w+): ", line):
            found[name[1]] = group
    return found


def nested(model: type[BaseModel]) -> list[type[BaseModel]]:
    """The models that a config's fields hold."""
    held = (part for field in model.model_fields.values() for part in (field.annotation, *get_args(field.annotation)))
    found = [part for part in held if isinstance(part, type) and issubclass(part, BaseModel)]
    return [part for part in found if not issubclass(part, BackendConfig)]  # those are plugins with their own place


def yaml_word(value: Any) -> str:
    """A value as YAML writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
