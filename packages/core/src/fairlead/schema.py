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
    """Moves the definitions of nested plugin schemas to the root, where their references point."""
    if isinstance(node, dict):
        for name, definition in node.pop("$defs", {}).items():
            definitions.setdefault(name, definition)
            _hoist(definition, definitions)
        for value in node.values():
            _hoist(value, definitions)
    elif isinstance(node, list):
        for value in node:
            _hoist(value, definitions)
