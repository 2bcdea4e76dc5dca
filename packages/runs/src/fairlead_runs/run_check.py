"""What a start would find in its run directory: read only, so that `check` and `explain` can say it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fairlead.config import JobConfig
from fairlead.errors import FairleadError
from fairlead.facts import Job, Setting
from fairlead.findings import CheckResult, Finding
from fairlead.jobs import LoadedJob
from fairlead.resolution import Resolution
from fairlead_runs import Fingerprint, fingerprint
from fairlead_runs.commit import Checkpoint, newest_complete, read_lock
from fairlead_runs.directory import finished_event, stored_fingerprint
from fairlead_runs.naming import run_directory
from fairlead_runs.remote.urls import is_url, split_checkpoint_url

__all__ = ["check_run", "check_run_directory"]


def check_run_directory(
    loaded: LoadedJob, resolution: Resolution, environ: Mapping[str, str], cwd: Path
) -> CheckResult:
    """The check `check.run_directory` of every job; see `check_run`."""
    assert loaded.job is not None
    settings, findings = check_run(loaded.job, resolution.job, cwd, resolution.world_size)
    return CheckResult(tuple(findings), settings)


def check_run(
    job: JobConfig, scheduled: Job | None, cwd: Path, world_size: int
) -> tuple[dict[str, Setting], list[Finding]]:
    """The settings `run_dir` and `resume` as they would be now, and what would stop a start.

    Args:
        job: The job.
        scheduled: The scheduler's job, which may be a task of an array.
        cwd: The working directory.
        world_size: The ranks that would be started.
    """
    try:
        path = run_directory(job.model_dump(mode="json"), job.run, scheduled, cwd)
    except FairleadError as error:
        return {}, [Finding("error", "name-invalid", error.what, where="run.name", why=error.why, fix=error.fix)]
    settings = {"run_dir": Setting(str(path), "run.dir and run.name")}
    try:
        stored = stored_fingerprint(path)
    except FairleadError as error:
        return settings, [
            Finding("error", "run-directory", error.what, where=error.where, why=error.why, fix=error.fix)
        ]
    asked = job.run.resume
    if asked not in ("auto", "never"):
        settings["resume"] = Setting(asked, "run.resume")
        return settings, _missing(asked, cwd, "run.resume")
    if asked == "never" or stored is None:
        reason = "a new run beside it" if stored is not None else "a new run"
        settings["resume"] = Setting(asked, f"run.resume: {reason}" if asked == "never" else reason)
        given = job.run.ckpt_path
        if given is not None:
            settings["resume"] = Setting(given, "run.ckpt_path, for the run has no checkpoint of its own")
            return settings, _missing(given, cwd, "run.ckpt_path")
        return settings, []
    return settings, _existing(path, job, stored, world_size, settings)


def _missing(asked: str, cwd: Path, where: str) -> list[Finding]:
    if is_url(asked):  # the store is asked when the run starts
        try:
            split_checkpoint_url(asked)
        except FairleadError as error:
            return [Finding("error", "resume-path", error.what, where=where, why=error.why, fix=error.fix)]
        return []
    path = cwd / asked
    if path.exists():
        return []
    return [
        Finding(
            "error",
            "resume-path",
            f"the checkpoint {str(path)!r} does not exist",
            where=where,
            fix="name a .ckpt file, or a folder under checkpoints/",
        )
    ]


def _existing(
    path: Path, job: JobConfig, stored: Fingerprint, world_size: int, settings: dict[str, Setting]
) -> list[Finding]:
    """What an existing run directory says to this job."""
    data = job.model_dump(mode="json")
    asked = fingerprint(data)
    if stored.digest != asked.digest:
        changed = "\n".join(str(difference) for difference in stored.differences(asked)[:20])
        settings["resume"] = Setting(None, "the run directory belongs to a run with other settings")
        return [
            Finding(
                "error",
                "run-directory",
                "the run directory belongs to a run with other settings",
                where=str(path),
                why=changed,
                fix=f"take the changes back, set another run.name, or use --resume never (makes {path.name}-2)",
            )
        ]
    if (end := finished_event(path, data)) is not None:
        settings["resume"] = Setting(None, f"the run is finished, at step {end.get('step')}")
        return [Finding("info", "run-finished", f"the run is finished, at step {end.get('step')}", where=str(path))]
    newest = newest_complete(path / "checkpoints").checkpoint
    value = str(newest.path) if newest is not None else job.run.ckpt_path
    settings["resume"] = Setting(value or "auto", "the newest complete checkpoint" if newest else "no checkpoint yet")
    return [*_locked(path), *(_batch(newest, job, world_size) if newest is not None else [])]


def _locked(path: Path) -> list[Finding]:
    state = read_lock(path / ".lock")
    if state is None or state.gone is not None:
        return []
    return [
        Finding(
            "warning",
            "run-directory",
            "another job is using the run directory now",
            where=str(path),
            why=f"process {state.owner.pid} on {state.owner.host}, since {state.owner.since}" if state.owner else None,
            fix="wait until it has ended, or set another run.name",
        )
    ]


def _batch(newest: Checkpoint, job: JobConfig, world_size: int) -> list[Finding]:
    """A changed world size changes the global batch; only the user knows what should stay."""
    before = newest.metadata.get("world_size")
    if before in (None, world_size) or job.trainer.batch_policy is not None:
        return []
    return [
        Finding(
            "error",
            "batch-policy",
            f"the run was trained with {before} ranks and would resume with {world_size}",
            where="trainer.batch_policy",
            why="the global batch would change with the number of ranks",
            fix="set batch_policy: keep_global (same global batch) or keep_per_device (same batch for each rank)",
        )
    ]
