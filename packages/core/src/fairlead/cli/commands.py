"""The core's own commands."""

from __future__ import annotations

from fairlead.plugin_classes import CommandPlugin

__all__ = ["check", "explain", "plugins", "schema"]

plugins = CommandPlugin(
    "plugins",
    "list the installed plugins, and the pip command for what is missing",
    arguments="fairlead.cli.installation:plugins_arguments",
    runtime="fairlead.cli.installation:run_plugins",
    group="installation",
    example=("--axis", "command"),
)
schema = CommandPlugin(
    "schema",
    "print the JSON schema of a job for the installed plugins",
    arguments="fairlead.cli.installation:schema_arguments",
    runtime="fairlead.cli.installation:run_schema",
    group="installation",
    example=(),
)
check = CommandPlugin(
    "check",
    "report what is wrong with a job before it runs, without torch",
    arguments="fairlead.cli.job:check_arguments",
    runtime="fairlead.cli.job:run_check",
    example=("no-such.yaml",),
)
explain = CommandPlugin(
    "explain",
    "show every setting of a job, its value, and the reason for it",
    arguments="fairlead.cli.job:explain_arguments",
    runtime="fairlead.cli.job:run_explain",
    example=("no-such.yaml",),
)
