"""From a job to what is requested from a scheduler: hardware, the lead of the warning, the command, the job files."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from fairlead import yaml
from fairlead.config import JobConfig, ResourcesConfig
from fairlead.config_bases import RequeueConfigBase, SubmitterConfigBase
from fairlead.errors import ConfigError
from fairlead.jobs import LoadedJob
from fairlead.overrides import parse_override
from fairlead.secret_names import is_secret_name
from fairlead_launch.submission.batch import BatchSubmitterConfig
from fairlead_runs import read_history
from fairlead_runs.states import HISTORY_FILE

WARN_S: Final = 120
"""Seconds that a step and a save are given where nothing was measured."""
_ROUND_S: Final = 60  # SLURM looks at its clock every half minute; a signal may come that much later or earlier
_WINDOW_S: Final = 600  # `limit_window_s` of a requeuer, as it is by itself


def hardware(job: JobConfig) -> ResourcesConfig:
    """The job's `resources`; where it has none what its trainer asks for."""
    if job.resources is not None:
        return job.resources
    trainer = job.trainer
    named = getattr(trainer.accelerator, "name", None)
    devices = trainer.devices if isinstance(trainer.devices, int) else len(trainer.devices)
    if trainer.devices == "auto" or devices < 1:
        devices = 1 if named == "cpu" else 0
    if named is None or not devices:
        lacking = "accelerator" if named is None else "devices"
        raise ConfigError(
            "the job does not say on what it is to run",
            where="resources",
            why=f"trainer.{lacking} is auto, and a login node is no evidence",
            fix="add resources: {nodes: 1, devices_per_node: 4, device: h100}, or device: cpu",
        )
    nodes = trainer.num_nodes if isinstance(trainer.num_nodes, int) else 1
    return ResourcesConfig(nodes=nodes, devices_per_node=devices, device=named)


def warning_lead(config: SubmitterConfigBase, runs: Sequence[Path]) -> int:
    """Seconds before the time limit at which the ranks are warned.

    What `submit.warn` says; else three times the longest save in the history of the runs and a minute, but not less
    than two minutes, which are also for the step that has to end first.

    Raises:
        ConfigError: It is more than the time limit leaves.
    """
    lead, why = WARN_S, "the default"
    longest = max((_longest_save(run) for run in runs), default=0.0)
    measured = _ROUND_S + math.ceil(3 * longest / 10) * 10
    if measured > lead:
        lead, why = min(measured, 65535), f"the longest save took {longest:.0f} s"
    if (requested := getattr(config, "warn", None)) is not None:
        lead, why = requested, "submit.warn"
    warned = hasattr(config, "warn")  # Kubernetes ends a pod as for any other reason, with the grace to save
    if warned and config.time is not None and config.time <= timedelta(seconds=lead + _ROUND_S):
        raise ConfigError(
            f"a time limit of {config.time} is too short to be warned {lead} seconds before its end",
            where="submit.time",
            why=f"{why}; the scheduler may warn a minute early",
            fix="ask for more time, or set `submit.warn` to what one step and one save take",
        )
    return lead


def _longest_save(run: Path) -> float:
    saves = [event for event in read_history(run / HISTORY_FILE) if event["event"] == "checkpoint"]
    return max((float(one["seconds"]) for one in saves if isinstance(one.get("seconds"), int | float)), default=0.0)


def command(config: SubmitterConfigBase) -> tuple[str, ...]:
    """The words that run `fairlead` on a node."""
    python = getattr(config, "python", None)
    if python is None:
        python = "python" if getattr(config, "container", None) is not None else sys.executable
    return (python, "-m", "fairlead")


def variables(config: SubmitterConfigBase) -> dict[str, str]:
    """The environment variables of the ranks: those of the network, then the job's own.

    Raises:
        ConfigError: A name that is none, or that of a secret: scripts are readable to others.
    """
    for name in config.env:
        where = f"submit.env.{name}"
        if not name.isascii() or not name.isidentifier():
            raise ConfigError(f"{name!r} is not the name of a variable", where=where)
        if is_secret_name(name):
            raise ConfigError(
                f"the secret {name} would be written to a file",
                where=where,
                fix=f"export {name} in the shell that submits, or read it from a file in `submit.setup`; "
                "on Kubernetes name a Secret that has it in `submit.secrets`",
            )
    network = NETWORKS[config.network] if config.network is not None else {}
    own = {name: str(int(value)) if isinstance(value, bool) else str(value) for name, value in config.env.items()}
    return {**network, **own}


def frozen(loaded: LoadedJob, code: Sequence[str], cwd: Path, name: str | None = None) -> dict[str, Any]:
    """The job with all that is decided now: it runs the same from wherever, and whenever, it is started.

    Args:
        loaded: The job, with its overrides.
        code: The folders of user code.
        cwd: What `run.dir` is relative to.
        name: The name of its run; None: as the job says, which may be a template.
    """
    assert loaded.job is not None
    run = loaded.job.run
    data: dict[str, Any] = copy.deepcopy(loaded.data)
    here = {"name": name or run.name, "dir": str((cwd / run.dir).absolute()), "code": list(code)}
    data["run"] = {**(data.get("run") or {}), **here}
    return data


def with_requeuer(data: dict[str, Any], job: JobConfig, warn_s: int, known: Sequence[str]) -> dict[str, Any]:
    """The data of a job with what of its requeuer follows from how it is submitted.

    Args:
        data: What `frozen` gives.
        job: The job.
        warn_s: The lead of the warning.
        known: The tags of the requeuers that are installed.
    """
    trainer, requested, submit = dict(data.get("trainer") or {}), job.trainer.requeue, job.submit
    window, limit = float(warn_s + 2 * _ROUND_S), float(_WINDOW_S)
    if isinstance(requested, RequeueConfigBase):
        limit = requested.limit_window_s
        if "requeue" not in trainer or window <= limit:  # one of `trainer.plugins` stays as it is
            return data
        own = requested.model_dump(mode="json", exclude_unset=True)
    else:
        wanted = getattr(job.trainer.environment, "auto_requeue", None) is not False
        if not wanted or not isinstance(submit, BatchSubmitterConfig) or not getattr(submit, "requeue", True):
            return data
        # The scheduler's commands are not in the container: the script outside of it reads the exit code.
        own = {"name": submit.name if submit.container is None else "exit_code"}
        if own["name"] not in known or (submit.container is None and window <= limit):
            return data
    if window > limit:
        own["limit_window_s"] = window
    return {**data, "trainer": {**trainer, "requeue": own}}


_NOT_THESE: Final = "^docker,lo,veth"
"""Interfaces by which no other node is reached; NCCL takes a list behind `^` as prefixes to leave out."""

NETWORKS: Final[Mapping[str, Mapping[str, str]]] = {
    # https://github.com/aws-samples/awsome-distributed-training/blob/main/1.architectures/efa-cheatsheet.md
    # Huge pages and fork do not go together: a loader's workers fail with "Cannot allocate memory".
    "efa": {
        "FI_PROVIDER": "efa",
        "FI_EFA_FORK_SAFE": "1",
        "FI_EFA_USE_HUGE_PAGE": "0",
        "NCCL_SOCKET_IFNAME": _NOT_THESE,
    },
    # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    # Named, so that a missing driver is an error: NCCL would continue over TCP, many times slower.
    "infiniband": {"NCCL_NET": "IB", "NCCL_SOCKET_IFNAME": _NOT_THESE},
    "ethernet": {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": _NOT_THESE},
}


MOST: Final = 10_000
_RANGE: Final = re.compile(r"\s*range\(\s*(-?\d+)\s*(?:,\s*(-?\d+)\s*(?:,\s*(-?\d+)\s*)?)?\)\s*")


def members(sweeps: Sequence[str]) -> list[tuple[str, ...]]:
    """The overrides of each member, as `--set` takes them; the last sweep varies fastest.

    Raises:
        ConfigError: Something is no `PATH=V1,V2` or `PATH=range(N)`, has no value, or is there twice.

    Example:
        >>> members(["run.seed=range(2)", "trainer.max_steps=10,20"])[1]
        ('run.seed=0', 'trainer.max_steps=20')
    """
    parsed = [_parse(text) for text in sweeps]
    paths = [path for path, _ in parsed]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise ConfigError(f"--sweep {twice} is there twice", where="--sweep", fix="write all of its values in one")
    count = 1
    for _, values in parsed:
        count *= len(values)
    if count > MOST:
        raise ConfigError(f"the sweep has {count} members, more than {MOST}", where="--sweep", fix="sweep over less")
    grid = itertools.product(*(values for _, values in parsed))
    return [tuple(f"{path}={_flow(value)}" for path, value in zip(paths, chosen, strict=True)) for chosen in grid]


def _parse(text: str) -> tuple[str, Sequence[Any]]:
    path, equals, values = text.partition("=")
    path = path.strip()
    if not equals or not values.strip():
        raise ConfigError(
            f"--sweep {text!r} is not PATH=VALUES",
            where="--sweep",
            fix="write for example --sweep trainer.max_steps=100,200 or --sweep 'run.seed=range(3)'",
        )
    first = parse_override(f"{path}=0")[0][0]  # says what is wrong with the path
    if first in ("submit", "resources"):
        raise ConfigError(
            f"all members of a sweep share their `{first}`",
            where=f"--sweep {path}",
            why="they are tasks of one array",
            fix="submit a job for each",
        )
    found: Sequence[Any]
    if match := _RANGE.fullmatch(values):
        numbers = [int(one) for one in match.groups() if one is not None]
        if len(numbers) == 3 and numbers[2] == 0:
            raise ConfigError(f"--sweep {path}: the step of a range cannot be 0", where="--sweep")
        found = range(*numbers)
    else:
        read = yaml.parse_scalar_or_flow(f"[{values}]", source=f"--sweep {path}")
        assert isinstance(read, list)  # the brackets are ours
        found = read
    if not found:
        raise ConfigError(f"--sweep {path} has no value: {values.strip()}", where="--sweep")
    return path, found


def _flow(value: Any) -> str:
    """A value as `--set` reads it back: JSON is YAML, but for what is no number."""
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"
    return json.dumps(value, ensure_ascii=False)
