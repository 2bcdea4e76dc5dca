"""The job of a command, loaded, resolved and checked once: by the process that the user started."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import cast

from fairlead.checks import CheckedJob, check_job
from fairlead.cli.job import load_requested
from fairlead.cli.session import Session
from fairlead.findings import Finding, raise_errors
from fairlead.jobs import LoadedJob
from fairlead.plugin_classes import EnvironmentPlugin
from fairlead.resolution import Resolution
from fairlead_launch.environment import inherited_plan
from fairlead_runs.evaluated import Weights, weights_to_evaluate
from fairlead_runs.naming import run_directory


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
    job = load_requested(arguments, session, overrides)
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
    raise_errors(_as_typed(finding, arguments) for finding in checked.findings)
    return checked


def _as_typed(finding: Finding, arguments: argparse.Namespace) -> Finding:
    """A finding about an option names that option, and not the setting that it stands for."""
    where = finding.where
    if where == "--set run.resume" and arguments.resume is not None:
        where = f"--resume {arguments.resume}"
    if where == "--set run.accept" and getattr(arguments, "accept", None):
        where = " ".join(f"--accept {setting}" for setting in arguments.accept)
    return dataclasses.replace(finding, where=where)


def with_weights(checked: CheckedJob, session: Session) -> tuple[CheckedJob, Weights]:
    """The job of an evaluation, whose `run.resume` is from now on the checkpoint to load, or `never`.

    Only what was requested here counts: a `run.resume` of the job file says how its fits begin.
    """
    job, resolution = checked.loaded.job, checked.resolution
    assert job is not None
    assert resolution is not None
    run = run_directory(job.model_dump(mode="json"), job.run, resolution.job, session.cwd)
    resume = job.run.resume if ("run", "resume") in checked.loaded.overrides else "auto"
    weights = weights_to_evaluate(resume, run, session.cwd)
    job = job.model_copy(update={"run": job.run.model_copy(update={"resume": weights.source or "never"})})
    return dataclasses.replace(checked, loaded=dataclasses.replace(checked.loaded, job=job)), weights


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
