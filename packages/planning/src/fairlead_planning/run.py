"""`fairlead plan JOB`: traces the job, tries the layouts, prints what fits."""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairlead import yaml
from fairlead.cli.job import load_requested
from fairlead.cli.session import Session
from fairlead.config.job import ResourcesConfig
from fairlead.errors import ConfigError, did_you_mean
from fairlead.findings import raise_errors
from fairlead.jobs import LoadedJob
from fairlead.overrides import apply_override
from fairlead_planning.calibration import Calibration, from_file
from fairlead_planning.devices import Machines
from fairlead_planning.layouts import STRATEGIES
from fairlead_runs.checkpoint_interval import measured
from fairlead_runs.naming import run_directory
from fairlead_runs.predicted import write_plan

if TYPE_CHECKING:
    from fairlead_planning.planning import Plan


def run(arguments: argparse.Namespace, session: Session) -> int:
    """0: something fits. An error says what is missing."""
    gc.disable()  # a trace is a hundred thousand objects that live to the end: looking for others takes a second
    try:
        return _run(arguments, session)
    finally:
        gc.enable()


def _run(arguments: argparse.Namespace, session: Session) -> int:
    loaded = load_requested(arguments, session)
    raise_errors(loaded.findings)
    job = loaded.job
    assert job is not None
    machines = _machines(arguments, job.resources)
    chosen = tuple(arguments.strategies or STRATEGIES)
    for name in chosen:
        if name not in STRATEGIES:
            raise ConfigError(
                f"{name!r} is no strategy that can be planned",
                where="--strategy",
                fix=did_you_mean(name, STRATEGIES) or f"one of {', '.join(STRATEGIES)}",
            )
    device = machines.cluster.device
    calibration = None
    if arguments.calibration is not None:
        calibration = from_file(session.cwd / arguments.calibration, device)
    target = None if arguments.write is None else session.cwd / arguments.write
    if target is not None:
        _writable(target, arguments.write)
    # Only now: these import torch, and what is wrong with the words is said before that.
    from fairlead_planning.job import planned_job
    from fairlead_planning.planning import plan

    directory = run_directory(job.model_dump(mode="json"), job.run, None, session.cwd)
    history = measured([directory]) if directory.is_dir() else None
    made = plan(
        planned_job(loaded, "cpu" if device.model == "" else "cuda"),
        machines,
        global_batch=arguments.batch,
        steps=arguments.steps,
        calibration=calibration,
        memory_gib=arguments.memory or (job.resources.memory_gib if job.resources and not arguments.gpus else None),
        strategies=chosen,
        measured=history,
        failures=arguments.failures,
    )
    _ = made.best  # raises what is missing, where nothing fits
    if arguments.json:
        session.print_json(made.to_dict())
    else:
        for line in made.lines(arguments.top):
            session.print(line)
    if target is not None:
        _write(made, loaded, arguments.choose, target, directory, session, calibration)
    return 0


def _writable(target: Path, name: str) -> None:
    if target.exists():
        raise ConfigError(f"{name} is there already", where="--write", fix="name a new file")
    if not target.parent.is_dir():
        raise ConfigError(f"the folder of {name} does not exist", where="--write", fix=f"mkdir -p {target.parent}")
    if not os.access(target.parent, os.W_OK):
        raise ConfigError(f"no permission to write into the folder of {name}", where="--write", fix="name another file")


def _machines(arguments: argparse.Namespace, resources: ResourcesConfig | None) -> Machines:
    if arguments.gpus is not None:
        return Machines.of(arguments.gpus, nodes=arguments.nodes, network=arguments.network)
    if resources is None or resources.device is None:
        raise ConfigError(
            "the devices are not given",
            where="--gpus",
            why="the job has no `resources` with a device",
            fix="write --gpus 64xh100, or resources: {nodes: 8, devices_per_node: 8, device: h100} in the job",
        )
    each = f"{resources.devices_per_node}x{resources.device}"
    return Machines.of(each, nodes=arguments.nodes or resources.nodes, network=arguments.network)


def _write(
    made: Plan,
    loaded: LoadedJob,
    number: int,
    target: Path,
    directory: Path,
    session: Session,
    calibration: Calibration | None,
) -> None:
    """Writes the job with a layout into another file, and the prediction into its run directory."""
    if number > len(made.found.candidates):
        count = len(made.found.candidates)
        raise ConfigError(f"there is no layout {number}", where="--choose", fix=f"one from 1 to {count}")
    from fairlead_planning.planning import settings_of, title

    one = made.found.candidates[number - 1]
    data: Any = copy.deepcopy(loaded.data)
    settings = settings_of(one.layout, made)
    for name, value in settings.items():
        data = apply_override(data, tuple(name.split(".")), value)
    if loaded.job is not None and loaded.job.resources is not None:
        cluster, each = made.machines.cluster, made.machines.count // made.machines.nodes
        machines = {"nodes": made.machines.nodes, "devices_per_node": each, "device": cluster.device.name}
        for name, value in machines.items():
            data = apply_override(data, ("resources", name), value)
    text = f"# Written by fairlead plan: {title(one.layout)}.\n{yaml.dump(json.loads(json.dumps(data, default=str)))}"
    target.write_text(text, encoding="utf-8")
    cluster = made.machines.cluster
    rates = 1.0 if calibration is None else calibration.numbers.get("measured rates", 1.0)
    write_plan(
        directory,
        made.figures(one),
        device=cluster.device.name,
        layout=settings,
        ranks=made.machines.count,
        rates=rates,
    )
    session.warn(f"wrote {target.name}, and what is predicted into {directory / 'plan.json'}")
