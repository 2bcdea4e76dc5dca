"""The commands `runs` and `status` as plugins; what each does is imported when it is called."""

from __future__ import annotations

from fairlead import CommandPlugin

__all__ = ["runs", "status"]

runs = CommandPlugin(
    "runs",
    "all runs: state, step, metric, last heartbeat",
    arguments="fairlead_runs.commands.runs:runs_arguments",
    runtime="fairlead_runs.commands.runs:run_runs",
    group="runs",
    example=(),
)
status = CommandPlugin(
    "status",
    "one run: its state, and which rank is stuck where",
    arguments="fairlead_runs.commands.status:status_arguments",
    runtime="fairlead_runs.commands.status:run_status",
    group="runs",
    example=("no-such-run",),
)
