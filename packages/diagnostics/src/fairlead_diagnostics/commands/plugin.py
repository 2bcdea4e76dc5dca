"""The commands `doctor`, `report`, `top` and `capabilities` as plugins, which import what they do when called."""

from __future__ import annotations

from typing import Final

from fairlead.plugin_classes import CommandPlugin

doctor: Final = CommandPlugin(
    "doctor",
    "test this machine, or each node of this allocation; or find out why a run is slow or hangs",
    arguments="fairlead_diagnostics.commands.doctor:arguments",
    runtime="fairlead_diagnostics.commands.doctor:run",
    group="installation",
    example=("--nodes", "no-such.yaml"),
)

report: Final = CommandPlugin(
    "report",
    "write a page about a run, or several: curves, where the time went, what happened, settings",
    arguments="fairlead_diagnostics.run_report.command:arguments",
    runtime="fairlead_diagnostics.run_report.command:run",
    engines=("jinja2>=3.1", "vl-convert-python"),
    extra="report",
    group="runs",
    example=("no-such-run",),
)

top: Final = CommandPlugin(
    "top",
    "watch a run in the terminal: loss, speed, data wait, memory, slow ranks",
    arguments="fairlead_diagnostics.top:arguments",
    runtime="fairlead_diagnostics.top:run",
    engines=("rich",),
    extra="report",
    group="runs",
    example=("no-such-run",),
)

capabilities: Final = CommandPlugin(
    "capabilities",
    "show which strategies work on which devices, or the details of one device or strategy",
    arguments="fairlead_diagnostics.commands.capabilities:arguments",
    runtime="fairlead_diagnostics.commands.capabilities:run",
    group="installation",
    example=("--for", "no-such-device"),
)
