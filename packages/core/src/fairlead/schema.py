"""The JSON schema of a job for the plugins that are installed: editors complete and check with it."""

from __future__ import annotations

from typing import Any

from fairlead.config import JobConfig

__all__ = ["job_schema"]


def job_schema() -> dict[str, Any]:
    """The JSON schema of a job file.

    Example:
        >>> job_schema()["title"]
        'A Fairlead job'
    """
    schema = JobConfig.model_json_schema()
    definitions: dict[str, Any] = {}
    _hoist(schema, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "A Fairlead job",
        "$defs": definitions,
    }


def _hoist(node: Any, definitions: dict[str, Any]) -> None:
    """Moves the definitions of nested plugin schemas to the root, where their references point.

    Two plugins may have different models of one name; the second gets another name there.
    """
    if isinstance(node, dict):
        own: dict[str, Any] = node.pop("$defs", {})
        renamed = {name: _free_name(name, model, definitions) for name, model in own.items()}
        _rename([node, own], {name: new for name, new in renamed.items() if name != new})
        for name, model in own.items():
            definitions.setdefault(renamed[name], model)
            _hoist(model, definitions)
        for value in node.values():
            _hoist(value, definitions)
    elif isinstance(node, list):
        for value in node:
            _hoist(value, definitions)


def _free_name(name: str, model: Any, definitions: dict[str, Any]) -> str:
    new, number = name, 2
    while definitions.get(new, model) != model:
        new, number = f"{name}-{number}", number + 1
    return new


def _rename(node: Any, names: dict[str, str]) -> None:
    if isinstance(node, dict):
        target = str(node.get("$ref", "")).removeprefix("#/$defs/")
        if target in names:
            node["$ref"] = f"#/$defs/{names[target]}"
        for value in node.values():
            _rename(value, names)
    elif isinstance(node, list):
        for value in node:
            _rename(value, names)
