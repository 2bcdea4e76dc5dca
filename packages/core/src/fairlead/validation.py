"""From pydantic's errors to findings: where in the file, why, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fairlead.config.job import EXTENDS, JobConfig
from fairlead.errors import ConfigError, FairleadError, did_you_mean
from fairlead.findings import Finding
from fairlead.open_union import OpenUnion
from fairlead.plugins import PluginManager

_OWN_CODES: Final = frozenset(
    {"unknown-tag", "plugin-missing", "plugin-broken", "wrong-type", "wrong-value", "axis-set-twice"}
)
_BOUNDS: Final = {
    "greater than or equal to": "a number from",
    "greater than": "a number above",
    "less than or equal to": "a number up to",
    "less than": "a number below",
}
_FEW: Final = 20
_OTHER_NAMES: Final = {
    **dict.fromkeys(("gpus", "num_gpus", "n_gpus", "ngpus", "gpu", "num_devices", "num_processes"), "devices"),
    **dict.fromkeys(("nodes", "nnodes", "n_nodes"), "num_nodes"),
    **dict.fromkeys(("epochs", "num_epochs", "n_epochs", "num_train_epochs"), "max_epochs"),
    **dict.fromkeys(("steps", "num_steps", "train_steps", "total_steps"), "max_steps"),
    **dict.fromkeys(("grad_clip", "clip", "clip_grad", "clip_grad_norm", "max_grad_norm"), "gradient_clip_val"),
    **dict.fromkeys(("accumulate", "grad_accum", "gradient_accumulation_steps"), "accumulate_grad_batches"),
    **dict.fromkeys(("fp16", "bf16", "amp", "dtype"), "precision"),
    **dict.fromkeys(("logger", "log"), "loggers"),
}
"""What others call a setting, where no spelling is near."""

_SECTIONS: Final = ("run", "trainer", "resources", "submit")
_NUMBER_WORDS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

M = TypeVar("M", bound=BaseModel)
Path = tuple[str | int, ...]
Locate = Callable[[Path], str]


def dotted(path: Path) -> str:
    """A config path as a user writes it: `trainer.loggers[0].name`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def validated(model: type[M], fields: object, where: str, plugins: PluginManager) -> M:
    """The config of what a script gives to `where`, as `Run`.

    Raises:
        ConfigError: The first mistake, at the argument's name.
    """
    try:
        return model.model_validate(fields, context={"plugins": plugins})
    except ValidationError as error:
        found = findings_of(error, fields, model, plugins, lambda path: ", ".join(filter(None, (where, dotted(path)))))
        raise found[0].as_error() from None


def as_config(model: type[M], given: object, where: str, plugins: PluginManager) -> M:
    """What a script gives for a config: one, or its fields.

    Raises:
        ConfigError: It is neither, or a field is wrong.
    """
    if isinstance(given, model):
        return given
    if isinstance(given, Mapping):
        return validated(model, given, where, plugins)
    name = model.__name__
    raise ConfigError(f"{_shown(given)} is no {name}", where=where, fix=f"give it a {name}, or a mapping of its fields")


def findings_of(
    error: ValidationError, data: Any, model: type[BaseModel], plugins: PluginManager, locate: Locate = dotted
) -> list[Finding]:
    """One finding for each mistake that pydantic found in `data`; `locate` makes a location of a config path."""
    groups: dict[Path, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        groups.setdefault(_real_path(detail["loc"], data, detail["type"]), []).append(detail)
    for path in [path for path, details in groups.items() if all(map(_is_mismatch, details))]:
        if any(len(other) > len(path) and other[: len(path)] == path for other in groups):
            del groups[path]  # another member of the union takes such data, and says what is wrong in them
    return [_finding(path, details, data, model, plugins, locate) for path, details in groups.items()]


def _is_mismatch(detail: ErrorDetails) -> bool:
    return detail["type"] == "literal_error" or detail["type"].endswith("_type")


def _real_path(loc: tuple[str | int, ...], data: Any, kind: str) -> Path:
    """The part of pydantic's location that exists in the data: its union members are not the user's words."""
    path: list[str | int] = []
    value = data
    for index, part in enumerate(loc):
        last = index == len(loc) - 1
        if isinstance(value, Mapping) and (part in value or (last and kind in {"missing", "extra_forbidden"})):
            value = value.get(part)
        elif isinstance(value, (list, tuple)) and isinstance(part, int) and part < len(value):
            value = value[part]
        elif isinstance(value, BaseModel) and part in type(value).model_fields:
            value = getattr(value, str(part))
        else:
            continue
        path.append(part)
    return tuple(path)


def _finding(
    path: Path,
    details: list[ErrorDetails],
    data: Any,
    model: type[BaseModel],
    plugins: PluginManager,
    locate: Locate,
) -> Finding:
    detail = details[0]
    kind, context = detail["type"], detail.get("ctx", {})
    where = locate(path) or None
    if kind in _OWN_CODES:
        return Finding("error", kind, context["what"], where=where, why=context.get("why"), fix=context.get("fix"))
    if kind == "extra_forbidden":
        return _unknown_field(path, data, model, plugins, where)
    if kind == "missing":
        return Finding(
            "error",
            "missing-field",
            f"{dotted(path)!r} is not set",
            where=where,
            fix=f"add `{path[-1]}: ...`",
        )
    got = _shown(detail["input"])
    if kind == "value_error":
        return Finding("error", "wrong-value", str(context["error"]), where=where)
    wanted = " or ".join(dict.fromkeys(_lowered(d["msg"]) for d in details))
    wanted = wanted.replace(" or it should be ", " or ")
    code = "wrong-type" if kind.endswith(("_type", "_parsing")) else "wrong-value"
    fix = None
    if isinstance(detail["input"], str) and code == "wrong-type" and _looks_numeric(detail["input"]):
        fix = "remove the quotes"
    elif isinstance(detail["input"], str) and detail["input"].lower() in _NUMBER_WORDS and "integer" in wanted:
        fix = f"write {_NUMBER_WORDS.index(detail['input'].lower())}"
    elif kind == "literal_error" and isinstance(detail["input"], str):
        near = did_you_mean(detail["input"], filter(None, str(context.get("expected", "")).split("'")[1::2]))
        fix = f"did you mean {near!r}?" if near else None
    elif all("it should be" in _lowered(d["msg"]) for d in details):
        fix = f"write {wanted.replace('it should be ', '')}"
        for bound, words in _BOUNDS.items():
            fix = fix.replace(bound, words)
    return Finding("error", code, f"{dotted(path) or 'the job'} is {got}: {wanted}", where=where, fix=fix)


def _unknown_field(path: Path, data: Any, model: type[BaseModel], plugins: PluginManager, where: str | None) -> Finding:
    name, parent = str(path[-1]), path[:-1]
    owner = _model_at(parent, data, model, plugins)
    fields = sorted(f.alias or n for n, f in owner.model_fields.items()) if owner else []
    fields += [EXTENDS] if owner is JobConfig else []
    if name == EXTENDS:
        what = f"{EXTENDS!r} stands inside of {dotted(parent)}"
        return Finding("error", "unknown-field", what, where=where, fix=f"write {EXTENDS} at the top of the file")
    other = _OTHER_NAMES.get(name)
    near = other if other in fields else did_you_mean(name, fields)
    section = _section_with(name, data, model, plugins) if len(parent) < 2 else None
    if near is None and section is not None:
        fix = f"move it there: `{section}: {{{name}: ...}}`"
        return Finding("error", "unknown-field", f"{name!r} is a field of {section}", where=where, fix=fix)
    listed = fields and (near is None or len(fields) <= _FEW)  # of sixty names the one that is meant is enough
    why = f"{dotted(parent) or 'a job'} takes: {', '.join(fields)}" if listed else None
    return Finding(
        "error",
        "unknown-field",
        f"unknown field {name!r}",
        where=where,
        why=why,
        fix=f"did you mean {near!r}?" if near else "remove it, or write one of these instead" if listed else None,
    )


def _section_with(name: str, data: Any, model: type[BaseModel], plugins: PluginManager) -> str | None:
    """The section of a job that has such a field."""
    for section in _SECTIONS:
        owner = _model_at((section,), data, model, plugins)
        if owner is not None and name in owner.model_fields:
            return section
    return None


def _model_at(path: Path, data: Any, model: type[BaseModel], plugins: PluginManager) -> type[BaseModel] | None:
    """The model that the data at a path was validated as."""
    current: type[BaseModel] | None = model
    value, depth = data, 0
    while depth < len(path) and current is not None:
        part = path[depth]
        value = _part(value, part)
        field = next((f for n, f in current.model_fields.items() if part in (n, f.alias)), None)
        if field is None:
            return None
        depth += 1
        if depth < len(path) and isinstance(path[depth], int) and isinstance(value, (list, tuple)):
            value = _part(value, path[depth])
            depth += 1
        current = _model_of((field.annotation, *field.metadata), value, plugins)
    return current


def _part(value: Any, part: str | int) -> Any:
    if isinstance(value, (list, tuple)) and isinstance(part, int):
        return value[part] if part < len(value) else None
    return value.get(part) if isinstance(value, Mapping) else getattr(value, str(part), None)


def _model_of(annotations: tuple[Any, ...], value: Any, plugins: PluginManager) -> type[BaseModel] | None:
    """The model class somewhere in an annotation; for an open union, the config of the plugin that is named."""
    for annotation in annotations:
        if isinstance(annotation, OpenUnion):
            name = value.get(annotation.tag) if isinstance(value, Mapping) else value
            try:
                return plugins.get(annotation.axis, str(name)).config
            except FairleadError:
                return None
    for annotation in annotations:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
        if (found := _model_of(get_args(annotation), value, plugins)) is not None:
            return found
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    kind = {"str": "the text ", "dict": "the mapping ", "list": "the list ", "bool": "", "NoneType": ""}
    return kind.get(type(value).__name__, "") + (text if len(text) <= 80 else text[:77] + "...")


def _lowered(message: str) -> str:
    message = message.replace("Input should be", "it should be")
    for old, new in (
        ("a valid dictionary", "a mapping"),
        ("a valid string", "text"),
        ("a valid tuple", "a list"),
        ("a valid ", "a "),
        (" a integer", " an integer"),
    ):
        message = message.replace(old, new)
    return message[0].lower() + message[1:]


def _looks_numeric(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text.lower() in {"true", "false"}
    return True
