"""A field that accepts any installed plugin of an axis, looked up when a value is validated.

A closed `Union[...]` would freeze the set of plugins when the class is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from fairlead.config_bases import AXES, BackendConfig
from fairlead.errors import FairleadError
from fairlead.plugin_classes import Plugin
from fairlead.plugins import PluginManager, default_plugins

__all__ = ["OpenUnion", "config_mistake", "parse_backend"]


_expanding: ContextVar[frozenset[str]] = ContextVar("fairlead_axes_in_schema", default=frozenset())
"""The axes whose plugins are being written into a JSON schema, so that a schema that holds itself ends."""


class OpenUnion:
    """Marks a field as "any plugin of this axis": `Annotated[StrategyConfigBase, OpenUnion("strategy")]`.

    A value may be a config object, a tag (`"ddp"`), or a mapping with `name`.

    Args:
        axis: The axis.
        literals: Words that are no plugin and stay as they are, such as `auto`.
        optional: Whether None is a value: no plugin at all.
        tag: What the tag is called in a mapping.
    """

    def __init__(self, axis: str, *, literals: tuple[str, ...] = (), optional: bool = False, tag: str = "name") -> None:
        self.axis = axis
        self.tag = tag
        self.literals = literals
        self.optional = optional

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def validate(value: Any, info: ValidationInfo) -> Any:
            if (isinstance(value, str) and value in self.literals) or (self.optional and value is None):
                return value
            context = info.context if isinstance(info.context, Mapping) else {}
            plugins = context.get("plugins") or default_plugins()
            return parse_backend(self.axis, value, plugins, context=info.context, literals=self.literals, tag=self.tag)

        def serialize(value: Any, info: core_schema.SerializationInfo) -> Any:
            dumped = value.model_dump(mode=info.mode) if isinstance(value, BackendConfig) else value
            return {self.tag: dumped.pop("name"), **dumped} if isinstance(dumped, dict) else dumped

        return core_schema.with_info_plain_validator_function(
            validate,
            serialization=core_schema.plain_serializer_function_ser_schema(serialize, info_arg=True),
        )

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The tagged `anyOf` of what is installed now; each plugin under every name it answers to."""
        plugins = default_plugins()
        options: list[JsonSchemaValue] = []
        names = [*self.literals, *plugins.names(self.axis)]
        if names:
            options.append({"type": "string", "enum": names})
        if self.axis in _expanding.get():  # a plugin that holds another of its axis, as `async` does
            options.append({"type": "object", "properties": {self.tag: {"enum": names}}, "required": [self.tag]})
            return {"anyOf": options, "title": f"{self.axis} (a plugin)"}
        by_class: dict[type[BackendConfig], list[str]] = {}
        for name, plugin in plugins.loaded(self.axis).items():
            by_class.setdefault(plugin.config, []).append(name)
        token = _expanding.set(_expanding.get() | {self.axis})
        try:
            options.extend(_object_schema(config, tags, handler, self.tag) for config, tags in by_class.items())
        finally:
            _expanding.reset(token)
        return {"anyOf": options, "title": f"{self.axis} (a plugin)"}


def _object_schema(
    config: type[BackendConfig], tags: list[str], handler: GetJsonSchemaHandler, tag: str
) -> JsonSchemaValue:
    # Through the handler, so that the definitions of nested models land beside those of the job.
    schema = handler(config.__pydantic_core_schema__)
    model = handler.resolve_ref_schema(schema)
    properties = model.setdefault("properties", {})
    properties.pop("name", None)
    properties[tag] = {"type": "string", "enum": sorted(tags)}
    model["required"] = sorted({*model.get("required", []), tag})
    return schema


def parse_backend(
    axis: str,
    value: Any,
    plugins: PluginManager,
    *,
    context: Any = None,
    literals: tuple[str, ...] = (),
    tag: str = "name",
) -> BackendConfig:
    """The config that a tag, a mapping with it, or a config object stands for; a mistake is a `config_mistake`."""
    if isinstance(value, BackendConfig):
        if not isinstance(value, AXES[axis]):
            raise _wrong(axis, f"a {type(value).__name__}, a config of the axis {value.axis!r}", literals, plugins)
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int, Mapping)):
        raise _wrong(axis, f"{type(value).__name__} {value!r}", literals, plugins)
    fields: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {tag: str(value)}
    name = fields.pop(tag, None)
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)  # `precision: 32` is the tag "32"
    if not isinstance(name, str) or "name" in fields:
        got = "a mapping with `name`" if "name" in fields else f"a mapping without `{tag}`"
        raise _wrong(axis, got, literals, plugins, tag)
    if name in literals:
        raise _wrong(axis, f"{name!r} with settings", literals, plugins)
    plugin = _lookup(axis, name, plugins, literals)
    merged = {**plugin.preset, **{str(key): item for key, item in fields.items()}, "name": plugin.tag}
    return plugin.config.model_validate(merged, context=context)


def _lookup(axis: str, name: str, plugins: PluginManager, literals: tuple[str, ...]) -> Plugin:
    try:
        return plugins.get(axis, name)
    except FairleadError as error:
        why = f"{error.why}; also: {', '.join(literals)}" if error.why and literals else error.why
        raise config_mistake(error.code or "unknown-tag", error.what, why=why, fix=error.fix) from None


def _wrong(
    axis: str, got: str, literals: tuple[str, ...], plugins: PluginManager, tag: str = "name"
) -> PydanticCustomError:
    names = ", ".join([*literals, *plugins.names(axis)]) or "none is installed"
    field = "submit" if axis == "submitter" else axis
    return config_mistake(
        "wrong-type",
        f"{got} is not a {axis}",
        why=f"a {axis} is a name or a mapping with `{tag}`; names: {names}",
        fix=f"write `{field}: NAME` or `{field}: {{{tag}: NAME, ...}}`",
    )


def config_mistake(code: str, what: str, *, why: str | None = None, fix: str | None = None) -> PydanticCustomError:
    """What a validator raises to have a finding with this code."""
    return PydanticCustomError(code, "{what}", {"what": what, "why": why, "fix": fix})
