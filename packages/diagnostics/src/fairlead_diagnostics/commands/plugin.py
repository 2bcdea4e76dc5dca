"""`fairlead doctor` and `fairlead capabilities` as plugins; what they do is imported when they are called."""

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

capabilities: Final = CommandPlugin(
    "capabilities",
    "what works with what: strategies on the devices of each vendor, or all there is to say of one device or strategy",
    arguments="fairlead_diagnostics.commands.capabilities:arguments",
    runtime="fairlead_diagnostics.commands.capabilities:run",
    group="installation",
    example=("--for", "no-such-device"),
)
