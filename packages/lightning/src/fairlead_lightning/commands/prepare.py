"""The job of a command, loaded, resolved and checked once: by the process that the user started."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import cast

from fairlead.checks import CheckedJob, check_job
from fairlead.cli.session import Session
from fairlead.findings import raise_errors
from fairlead.jobs import LoadedJob, load_job
from fairlead.plugin_classes import EnvironmentPlugin
from fairlead.resolution import Resolution
from fairlead_launch.plans import inherited_plan


def prepare(
    arguments: argparse.Namespace,
    session: Session,
    *,
    uses_run: bool,
    loaded: Callable[[LoadedJob], None] | None = None,
) -> CheckedJob:
    """The job, loaded, resolved and checked; a rank that Fairlead started was handed all that, and finds itself.

    `loaded` is called with the job before it is checked.
    """
    handed: CheckedJob | None = inherited_plan(session.environ)
    if handed is not None:
        return dataclasses.replace(handed, resolution=_of_this_rank(handed.resolution, session))
    overrides = list(arguments.overrides)
    if arguments.resume is not None:
        overrides.append(f"run.resume={json.dumps(arguments.resume)}")
    if getattr(arguments, "wait", False):
        overrides.append("run.wait=true")
    if getattr(arguments, "accept", None):
        overrides.append(f"run.accept={json.dumps(arguments.accept)}")
    job = load_job(arguments.job, plugins=session.plugins, cwd=session.cwd, overrides=overrides)
    if loaded is not None:
        loaded(job)
    checked = check_job(
        job,
        environ=session.environ,
        plugins=session.plugins,
        purpose="run",
        cwd=session.cwd,
        uses_run=uses_run,
    )
    raise_errors(checked.findings)
    return checked


def _of_this_rank(resolution: Resolution | None, session: Session) -> Resolution:
    """What was resolved for all ranks, with which of them this is."""
    assert resolution is not None
    environment = resolution.environment
    plugin = cast("EnvironmentPlugin", session.plugins.of(environment))
    answers = session.plugins.call(plugin, "fairlead_topology", config=environment, environ=session.environ)
    topology = next(iter(answers))
    names = ("global_rank", "local_rank", "node_rank", "main_address", "main_port")
    own = {name: getattr(topology, name) for name in names}
    return dataclasses.replace(resolution, topology=topology, settings={**resolution.settings, **own})
