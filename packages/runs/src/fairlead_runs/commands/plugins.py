"""The commands `runs`, `status`, `logs` and `cancel` as plugins; what each does is imported when it is called."""

from __future__ import annotations

from fairlead import CommandPlugin

__all__ = ["cancel", "logs", "runs", "status"]

runs = CommandPlugin(
    "runs",
    "list all runs: state, step, metric, last heartbeat",
    arguments="fairlead_runs.commands.runs:runs_arguments",
    runtime="fairlead_runs.commands.runs:run_runs",
    group="runs",
    example=(),
)
status = CommandPlugin(
    "status",
    "show one run: its state, scheduler job and speed, and which rank is stuck where",
    arguments="fairlead_runs.commands.status:status_arguments",
    runtime="fairlead_runs.commands.status:run_status",
    group="runs",
    example=("no-such-run",),
)
logs = CommandPlugin(
    "logs",
    "show what the ranks of a run printed, sorted by time; -f follows",
    arguments="fairlead_runs.commands.logs:logs_arguments",
    runtime="fairlead_runs.commands.logs:run_logs",
    group="runs",
    example=("no-such-run",),
)
cancel = CommandPlugin(
    "cancel",
    "stop a run with a checkpoint, or at once",
    arguments="fairlead_runs.commands.cancel:cancel_arguments",
    runtime="fairlead_runs.commands.cancel:run_cancel",
    group="runs",
    example=("no-such-run",),
)
