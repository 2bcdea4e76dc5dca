"""The command `fairlead submit`."""

from __future__ import annotations

from fairlead.plugin_classes import CommandPlugin

submit = CommandPlugin(
    "submit",
    "submit a job to a scheduler, with a copy of its code; a sweep as an array",
    arguments="fairlead_launch.submission.command:arguments",
    runtime="fairlead_launch.submission.command:run",
    example=("no-such.yaml", "--dry-run"),
)
