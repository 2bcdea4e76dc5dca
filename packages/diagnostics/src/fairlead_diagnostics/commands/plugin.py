"""`fairlead doctor` as a plugin; what it does is imported when it is called."""

from __future__ import annotations

from typing import Final

from fairlead.plugin_classes import CommandPlugin

doctor: Final = CommandPlugin(
    "doctor",
    "is this machine, or each node of this allocation, fit to train?",
    arguments="fairlead_diagnostics.commands.doctor:arguments",
    runtime="fairlead_diagnostics.commands.doctor:run",
    group="installation",
    example=("--nodes", "no-such.yaml"),
)
