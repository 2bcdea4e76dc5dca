"""What the scheduler of this process says and does, as its environment plugin knows it."""

from __future__ import annotations

import dataclasses
import os
import pkgutil
import time
from collections.abc import Mapping

from fairlead.config import TrainerConfig
from fairlead.detect import find_jobs
from fairlead.errors import FairleadError
from fairlead.facts import StopReason
from fairlead.hooks import answer
from fairlead.interfaces import BuildContext, Requeuer
from fairlead.plugins import PluginManager, default_plugins
from fairlead.resolve import resolve
from fairlead_hpc_signals.outcomes import ASK_TIMEOUT, LIMIT_WINDOW


def why_stopped(
    environ: Mapping[str, str],
    *,
    plugins: PluginManager | None = None,
    timeout_s: float = ASK_TIMEOUT,
    limit_window_s: float = LIMIT_WINDOW,
) -> StopReason:
    """Asks the scheduler of this job why it is to stop, by the hook `fairlead_why` of its environment.

    On one rank only: thousands that ask would bring the scheduler down.

    Args:
        environ: The environment of the job: names it, and finds the scheduler's commands.
        plugins: Where the environments are found; None: those that are installed.
        timeout_s: Seconds for the full answer; without one the reason is `unknown`.
        limit_window_s: See `LIMIT_WINDOW`; longer where jobs are warned earlier, as by `--signal=USR1@1800`.
    """
    deadline = time.monotonic() + timeout_s
    plugins = default_plugins() if plugins is None else plugins
    tag = next(iter(find_jobs(environ, plugins)), None)
    if tag is None:
        return StopReason("unknown", "this process belongs to no job of a scheduler that is known here")
    owner = plugins.get("environment", tag)
    try:
        reason = answer(plugins, owner, "fairlead_why", StopReason, environ=environ, deadline=deadline)
    except FairleadError as error:  # a plugin's mistake; a stop must not fail by it, and the history has it
        return StopReason("unknown", f"{error.what}: {error.why}" if error.why else error.what)
    if reason is None:
        return StopReason("unknown", f"the environment {tag!r} does not say why a job is to stop")
    near = reason.remaining_s is not None and reason.remaining_s <= limit_window_s
    return dataclasses.replace(reason, why="time_limit") if reason.why == "unknown" and near else reason


def requeuer_here(environ: Mapping[str, str] | None = None) -> Requeuer | None:
    """The requeuer that `requeue: auto` takes for this process, with its usual settings.

    None where no scheduler is seen: then the exit code 75 asks whoever started the job.
    """
    environ = os.environ if environ is None else environ
    plugins = default_plugins()
    # Which devices there are is of no interest here, and to look for them may take seconds.
    fields = {"accelerator": "cpu"} if "cpu" in plugins.names("accelerator") else {}
    trainer = TrainerConfig.model_validate(fields, context={"plugins": plugins})
    resolution = resolve(trainer, environ=environ, plugins=plugins)
    config = resolution.requeue
    if resolution.settings["requeue"].value == "none":
        return None
    plugin = plugins.of(config)
    made: Requeuer = pkgutil.resolve_name(str(plugin.runtime))(config, BuildContext(resolution, environ, plugins))
    return made
