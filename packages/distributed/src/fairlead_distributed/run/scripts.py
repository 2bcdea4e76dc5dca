"""What a run that a script opens needs beside that of a job: which one it is, its ranks, and advice for scripts."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairlead.config import RunConfig, TrainerConfig
from fairlead.errors import ConfigError, FairleadError, FingerprintError
from fairlead.findings import Finding, raise_errors
from fairlead.interfaces import Setting
from fairlead.resolve import Resolution
from fairlead_launch.reports import show_without_traceback


def run_config(run: str | os.PathLike[str] | RunConfig | None) -> RunConfig:
    """The run's name and folder, which a path gives both; nothing is seeded here.

    Raises:
        ConfigError: It is neither a path nor a config.
    """
    if isinstance(run, RunConfig):
        return run
    if run is None:
        return RunConfig(seed=None)
    if not isinstance(run, (str, os.PathLike)):
        what = f"{run!r:.80} is neither a path nor a RunConfig"
        raise ConfigError(what, where="the first argument", fix="give the run's folder, or a RunConfig")
    path = Path(run)
    return RunConfig(name=path.name, dir=str(path.parent), seed=None)


def described_job(run: RunConfig, model: Any, data: Any, trainer: Mapping[str, Any]) -> dict[str, Any]:
    """A job that was made in Python, in the shape of a job file: what identifies the run."""
    return {"run": run.model_dump(mode="json"), "model": model, "data": data, "trainer": dict(trainer)}


def as_seen(
    resolution: Resolution, seen: Mapping[str, Any], config: TrainerConfig, *, by: str, connect: str
) -> Resolution:
    """The resolution of this machine, corrected to what a script's own engine has decided.

    Args:
        resolution: What Fairlead would have decided.
        seen: `world_size`, `num_nodes`, `global_rank` and what else the engine says, by the names of the settings.
        config: The trainer's settings that hold for the engine.
        by: The engine, for messages: `Trainer`.
        connect: What has the ranks train together, as a sentence's end; may hold `{devices}` (of a node) and `{nodes}`.

    Raises:
        ConfigError: A launcher has started several ranks, or WORLD_SIZE says so, and the engine knows of one: each
            would train alone.
    """
    ranks, nodes = int(seen["world_size"]), int(seen["num_nodes"])
    raise_errors(_alone(resolution, by, connect) if ranks == 1 else ())
    counts: dict[str, Any] = {"world_size": ranks, "num_nodes": nodes, "devices": ranks // nodes}
    own = {name: Setting(value, f"the script's own {by}") for name, value in {**seen, **counts}.items()}
    return dataclasses.replace(resolution, settings={**resolution.settings, **own}, trainer=config, **counts)


@contextmanager
def advice_for_scripts() -> Iterator[None]:
    """What refuses to open a run says what to change in a script, which has no command line of ours; no traceback."""
    try:
        yield
    except FairleadError as error:
        accepted = re.findall(r"--accept (\S+?)(?=[; ]|$)", error.fix or "", re.MULTILINE)
        if isinstance(error, FingerprintError) and accepted:
            error.fix = (
                "undo the changes to continue it, or accept those that make no difference: "
                f"RunConfig(accept={accepted!r});\n"
                'or give the run another name, or RunConfig(resume="never"): a new directory beside it;\n'
                "or RunConfig(resume=CHECKPOINT): a new directory that starts from a checkpoint of this run"
            )
        if "other_rank" not in vars(error):  # rank 0 shows it
            show_without_traceback(error)
        raise


def _alone(resolution: Resolution, by: str, connect: str) -> Iterator[Finding]:
    """Whether there are ranks, started by a launcher or said by WORLD_SIZE, that the engine does not know of."""
    topology = resolution.topology
    started, here = topology.world_size, topology.local_world_size
    yield from (one for one in resolution.findings if one.code == "world-size-contradicted")
    if not topology.launched:  # one of several nodes, on which a Trainer is to start the ranks
        started = resolution.settings["world_size"] if resolution.num_nodes > 1 else None
    if started is None or started.value == 1:
        return
    devices = here.value if here is not None else started.value // resolution.num_nodes
    nodes = f", num_nodes={topology.num_nodes.value}" if topology.num_nodes is not None else ""
    yield Finding(
        "error",
        "launch-mismatch",
        f"this is one of {started.value} ranks, but the {by} knows of one and would train alone: "
        f"{connect.format(devices=devices, nodes=nodes)}",
        where=by,
        why=f"{started.value} comes from {started.reason}",
        fix="if each is to train alone, give each its own run, and export FAIRLEAD_ENVIRONMENT=lightning",
    )
