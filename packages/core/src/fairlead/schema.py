"""The JSON schema of a job for the plugins that are installed: editors complete and check with it."""

from __future__ import annotations

from typing import Any

from fairlead.config import JobConfig


def job_schema() -> dict[str, Any]:
    """The JSON schema of a job file.

    Example:
        >>> job_schema()["title"]
        'A Fairlead job'
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **JobConfig.model_json_schema(),
        "title": "A Fairlead job",
    }
