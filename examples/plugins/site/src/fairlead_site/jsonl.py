"""A logger that writes each line of metrics as JSON: the settings, and what this plugin contributes."""

from __future__ import annotations

from typing import Literal

from fairlead import LoggerConfigBase, LoggerPlugin


class JSONLLoggerConfig(LoggerConfigBase):
    """One line of JSON for each call, in the run directory."""

    name: Literal["jsonl"] = "jsonl"
    """The tag."""
    file: str = "metrics.jsonl"
    """The file in the run directory."""


class JSONL(LoggerPlugin):
    """Lines of JSON."""

    config = JSONLLoggerConfig
    runtime = "fairlead_site.jsonl_runtime:build"
    engines = ("lightning",)


jsonl = JSONL()
