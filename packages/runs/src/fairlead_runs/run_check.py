"""What a start would find in its run directory: read only, so that `check` and `explain` can say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from fairlead.config import JobConfig
from fairlead.errors import ConfigError, FairleadError
from fairlead.facts import Setting
from fairlead.findings import CheckResult, Finding
from fairlead.jobs import LoadedJob
from fairlead.resolution import Resolution
from fairlead_runs import Fingerprint, fingerprint
from fairlead_runs.batch_size import batch_plan
from fairlead_runs.commit import named_checkpoint, newest_complete, read_lock
from fairlead_runs.naming import run_directory
from fairlead_runs.ownership import finished_event, require_same, same_run, stored_fingerprint
from fairlead_runs.remote.store import is_url, split_checkpoint_url
from fairlead_runs.switches import STOP, find_switch


def check_run_directory(
    loaded: LoadedJob, resolution: Resolution, environ: Mapping[str, str], cwd: Path
) -> CheckResult:
    """The check `check.run_directory` of every job: the settings `run_dir` and `resume`, and what stops a start."""
    assert loaded.job is not None
    job, settings = loaded.job, dict[str, Setting]()
    try:
        path = run_directory(job.model_dump(mode="json"), job.run, resolution.job, cwd)
    except FairleadError as error:
        return CheckResult((Finding.of(error, "error", "name-invalid", where="run.name"),))
    settings["run_dir"] = Setting(str(path), "run.dir and run.name")
    try:
        stored = stored_fingerprint(path)
    except FairleadError as error:
        return CheckResult((Finding.of(error, "error", "run-directory"),), settings)
    requested = job.run.resume
    if (named := job.run.load or job.run.weights) is not None:
        settings["resume"] = Setting(requested, "run.resume")
        return CheckResult(_missing(named, path, cwd, "run.resume"), settings)
    if requested == "auto" and stored is not None:
        return CheckResult(_existing(path, job, stored, resolution, settings, cwd), settings)
    reason = "a new run beside it" if stored is not None else "a new run"
    settings["resume"] = Setting(requested, f"run.resume: {reason}" if requested == "never" else reason)
    given = job.run.ckpt_path
    if given is None:
        return CheckResult((), settings)
    settings["resume"] = Setting(given, "run.ckpt_path, for the run has no checkpoint of its own")
    return CheckResult(_missing(given, path, cwd, "run.ckpt_path"), settings)


def _missing(requested: str, run: Path, cwd: Path, where: str) -> tuple[Finding, ...]:
    try:
        if is_url(requested):  # the store is queried when the run starts
            split_checkpoint_url(requested)
        elif not Path(found := named_checkpoint(requested, run, cwd)).exists():
            what = f"the checkpoint {found!r} does not exist"
            raise ConfigError(what, fix="name a run directory, a folder under its checkpoints/, or a .ckpt file")
    except FairleadError as error:
        return (Finding.of(error, "error", "resume-path", where=where),)
    return ()


def _existing(
    path: Path, job: JobConfig, stored: Fingerprint, resolution: Resolution, settings: dict[str, Setting], cwd: Path
) -> tuple[Finding, ...]:
    """What an existing run directory says to this job."""
    data = job.model_dump(mode="json")
    try:
        require_same(path, stored, fingerprint(data))
    except FairleadError as error:
        settings["resume"] = Setting(None, error.what)
        return (Finding.of(error, "error", "run-directory"),)
    same = same_run(stored, fingerprint(data))
    if same and (end := finished_event(path, data)) is not None:
        settings["resume"] = Setting(None, f"the run is finished, at step {end.get('step')}")
        return (Finding("info", "run-finished", f"the run is finished, at step {end.get('step')}", where=str(path)),)
    newest = newest_complete(path / "checkpoints").checkpoint
    value = str(newest.path) if newest is not None else job.run.ckpt_path
    settings["resume"] = Setting(value or "auto", "the newest complete checkpoint" if newest else "no checkpoint yet")
    found = [*_locked(path, resolution), *_switched(path)]
    if newest is None and job.run.ckpt_path is not None:
        found += _missing(job.run.ckpt_path, path, cwd, "run.ckpt_path")
    try:
        batch_plan(resolution, newest.metadata if newest is not None else None)
    except FairleadError as error:
        found.append(Finding.of(error, "error", "batch-policy"))
    return tuple(found)


def _switched(path: Path) -> Iterator[Finding]:
    with suppress(OSError):  # the start says what is wrong with the directory
        if (switch := find_switch(path, STOP)) is not None:
            yield Finding(
                "warning",
                "run-directory",
                f"the start will stop before its first step: {switch}",
                where=str(switch.path),
                why=f"it is there since {datetime.fromtimestamp(switch.time):%Y-%m-%d %H:%M:%S}",
                fix="remove it, if it is an old one",
            )


def _locked(path: Path, resolution: Resolution) -> list[Finding]:
    state = read_lock(path / ".lock")
    if state is None or state.gone is not None:
        return []
    job = state.owner.job if state.owner is not None else None
    same = job is not None and resolution.job is not None and job == resolution.job.id
    return [
        Finding(
            "warning",
            "run-directory",
            f"another {'process of this same job' if same else 'job'} is using the run directory now",
            where=str(path),
            why=f"process {state.owner.pid} on {state.owner.host}, since {state.owner.since}" if state.owner else None,
            fix="wait until it has ended, or set another run.name",
        )
    ]
