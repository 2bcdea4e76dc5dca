"""The job that a checkpoint carries: in its run directory, or in the folder that was exported of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from fairlead.config import JobConfig
from fairlead.errors import CheckpointError, ConfigError, did_you_mean
from fairlead.findings import raise_errors
from fairlead.jobs import LoadedJob, load_job
from fairlead.plugins import PluginManager, default_plugins
from fairlead_runs.commit import best_or_last, newest_complete
from fairlead_runs.fingerprints import leaves
from fairlead_runs.redaction import REDACTED
from fairlead_runs.states import is_run

_JOB: Final = "job.yaml"
_WEIGHTS: Final = "weights.safetensors"
_STATE: Final = "state.ckpt"
_STAND_IN: Final = re.compile(r"<[A-Za-z_][\w.]*>")
"""Texts like `<torch.nn.modules.linear.Linear>`, which a description has instead of an object."""


@dataclass(frozen=True)
class CheckpointJob:
    """A job, valid, and the checkpoint to resume from, if there is one, or the weights of an exported folder."""

    loaded: LoadedJob
    checkpoint: Path | None = None
    weights: Path | None = None


def checkpoint_job(
    path: Path, *, plugins: PluginManager, cwd: Path, environ: Mapping[str, str], overrides: Sequence[str] = ()
) -> CheckpointJob:
    """The job of a checkpoint, a run directory or an exported folder; its `run` is the one that it is of.

    `CheckpointError`: there is none, or it carries no job.  `ConfigError`: it does not validate, or lacks a secret.
    """
    path = best_or_last(Path(os.path.abspath(cwd / path)))
    file = job_file(path)
    run = file.parent
    loaded = load_job(
        str(file), plugins=plugins, cwd=cwd, environ=environ, overrides=overrides, recorded_code=_code(run)
    )
    raise_errors(loaded.findings)
    assert loaded.job is not None
    if secret := next((where for where, text in leaves(loaded.data) if REDACTED in str(text)), None):
        raise ConfigError(
            "the checkpoint's job lacks a secret",
            where=f"{file}, {secret}",
            why="secrets are not written into run directories",
            fix=f"set it: overrides=['{secret}=...']",
        )
    if (run / _WEIGHTS).is_file():
        return CheckpointJob(loaded, weights=run / _WEIGHTS)
    here = {"dir": str(run.parent), "name": run.name.replace("{", "{{").replace("}", "}}")}
    update = {name: value for name, value in here.items() if ("run", name) not in loaded.overrides}
    job = loaded.job.model_copy(update={"run": loaded.job.run.model_copy(update=update)})
    return CheckpointJob(replace(loaded, job=job), checkpoint=_checkpoint(path, run))


def job_from_checkpoint(
    path: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    plugins: PluginManager | None = None,
) -> JobConfig:
    """The job that made a checkpoint, as its run directory or exported folder holds it; needs no torch.

    Args:
        path: A run directory, a checkpoint in it, or a folder of `fairlead checkpoint export`.
        overrides: Changes, written as for `--set`: `trainer.max_steps=400`.
        environ: What a `${env:NAME}` in the overrides reads; None: the variables of this process.
        plugins: The plugin manager; None: the plugins installed here.

    Raises:
        CheckpointError: There is no such checkpoint, or it carries no job, as a single `.ckpt` file.
        ConfigError: The job does not validate here, or had a secret that is not written down.

    Example:
        >>> job_from_checkpoint("runs/gpt/checkpoints/step-00000200").model.class_  # doctest: +SKIP
        'examples.gpt.model:GPT'
    """
    plugins = plugins if plugins is not None else default_plugins()
    environ = os.environ if environ is None else environ
    found = checkpoint_job(Path(path), plugins=plugins, cwd=Path.cwd(), environ=environ, overrides=overrides)
    assert found.loaded.job is not None
    return found.loaded.job


def job_file(path: Path) -> Path:
    """The `job.yaml` of a checkpoint, a run directory or an exported folder; `CheckpointError` where there is none."""
    if not path.exists():
        folder = next(parent for parent in path.parents if parent.is_dir())
        near = did_you_mean(path.relative_to(folder).parts[0], os.listdir(folder))
        raise CheckpointError(
            "there is no such checkpoint",
            where=str(path),
            fix=f"did you mean {str(folder / near)!r}?" if near else "give the path of one that exists",
        )
    for folder in (path, *list(path.parents)[:4]):
        if (folder / _JOB).is_file() and (is_run(folder) or (folder / _WEIGHTS).is_file()):
            return folder / _JOB
    raise CheckpointError(
        "this checkpoint carries no job",
        where=str(path),
        why="it is in no run directory of Fairlead's, nor a folder of `fairlead checkpoint export`",
        fix="name the run directory or a checkpoint in it; or give the job file: fairlead fit JOB --resume PATH",
    )


def refuse_stand_ins(job: JobConfig, *, fix: str) -> None:
    """Raises a `CheckpointError` for a job that a script described, of whose arguments some are known by type only."""
    for where, spec in (("model", job.model), ("data", job.data)):
        for path, text in leaves(spec.args, f"{where}.args") if spec is not None else ():
            if isinstance(text, str) and _STAND_IN.fullmatch(text):
                raise CheckpointError(
                    "the checkpoint's job cannot be rebuilt",
                    where=f"{path}: {text}",
                    why="the run was started from Python, and this argument is no plain data: only its type is known",
                    fix=fix,
                )


def _code(run: Path) -> list[Path]:
    """The folders in which its last start found code, those that are there."""
    starts = sorted(run.glob("starts/*/provenance.json"), key=lambda file: int(file.parent.name))
    try:
        found = json.loads(starts[-1].read_bytes()) if starts else {}
    except ValueError:
        return []  # damaged: then where it is looked for any job
    return [folder for one in found.get("code", ()) if (folder := Path(one)).is_dir()]


def _checkpoint(path: Path, run: Path) -> Path | None:
    if path in (run, run / "checkpoints"):
        newest = newest_complete(run / "checkpoints").checkpoint
        return newest.path if newest is not None else None
    return path.parent if path.name == _STATE else path
