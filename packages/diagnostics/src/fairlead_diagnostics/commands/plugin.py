"""`fairlead doctor` and `fairlead capabilities` as plugins; what they do is imported when they are called."""

from __future__ import annotations

from typing import Final

from fairlead.plugin_classes import CommandPlugin

doctor: Final = CommandPlugin(
    "doctor",
    "test this machine, or each node of this allocation, before training",
    arguments="fairlead_diagnostics.commands.doctor:arguments",
    runtime="fairlead_diagnostics.commands.doctor:run",
    group="installation",
    example=("--nodes", "no-such.yaml"),
)

capabilities: Final = CommandPlugin(
    "capabilities",
    "show which strategies work on which devices, or the details of one device or strategy",
    arguments="fairlead_diagnostics.commands.capabilities:arguments",
    runtime="fairlead_diagnostics.commands.capabilities:run",
    group="installation",
    example=("--for", "no-such-device"),
)
