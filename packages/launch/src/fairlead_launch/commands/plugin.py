"""The commands that start processes; what they need is imported when one of them runs."""

from __future__ import annotations

from typing import Final

from fairlead.plugin_classes import CommandPlugin

launch: Final = CommandPlugin(
    "launch",
    "run any script in several processes and nodes, and restart it after a failure",
    arguments="fairlead_launch.commands.launch:arguments",
    runtime="fairlead_launch.commands.launch:run",
    example=("--print-commands", "no-such.py"),
)
submit: Final = CommandPlugin(
    "submit",
    "submit a job to a scheduler, with a copy of its code; a sweep as an array",
    arguments="fairlead_launch.submission.command:arguments",
    runtime="fairlead_launch.submission.command:run",
    example=("no-such.yaml", "--dry-run"),
)
