"""The batch of a job, and what its learning rate is multiplied by, as far as its file says."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fairlead.config import ClassSpec, JobConfig
from fairlead.errors import ConfigError, FairleadError
from fairlead.facts import Setting
from fairlead.findings import CheckResult, Finding
from fairlead.jobs import LoadedJob
from fairlead.resolution import Resolution
from fairlead.user_code import CallableInfo, find_callable
from fairlead_runs import fingerprint
from fairlead_runs.batch_size import GlobalBatch, batch_of_job, batch_plan, data_ranks, for_each_rank, lr_setting
from fairlead_runs.commit import newest_complete
from fairlead_runs.naming import run_directory
from fairlead_runs.ownership import same_run, stored_fingerprint


def check_batch(loaded: LoadedJob, resolution: Resolution, environ: Mapping[str, str], cwd: Path) -> CheckResult:
    """The check `check.batch`: the settings `batch_per_device`, `global_batch` and `lr_factor`, with their numbers."""
    job = loaded.job
    assert job is not None
    path, trainer = job.trainer.batch_size_from, job.trainer
    try:
        ranks = data_ranks(resolution)
    except ConfigError:
        return CheckResult(())  # the strategy's own check says it
    try:
        size = batch_of_job(for_each_rank(job, resolution))
        total = batch_of_job(job)
    except ConfigError as error:
        return CheckResult((Finding.of(error, "error", "batch-size", where=error.where or path),))
    reason = loaded.locate(tuple(path.split(".")))
    if size is None and (size := _default(loaded, job)) is not None:
        reason = f"the default of {_spec(job).class_}"  # type: ignore[union-attr]  # it has a default
    settings = {}
    findings: list[Finding] = []
    if size is not None:
        accumulate = _accumulate(job, resolution, cwd)
        shared_by, drives = resolution.world_size // ranks, resolution.devices_per_rank
        batch = GlobalBatch(size, ranks, resolution.num_nodes, accumulate, shared_by, drives)
        if trainer.batch_size == "global":
            parts = str(batch).partition(" x ")[2] or "1 rank"
            reason = f"{reason}: {total} / {f'({parts})' if ' x ' in parts else parts}"
        if drives > 1 and size % drives:
            below = size // drives * drives
            fix = f"a batch size of {f'{below} or ' if below else ''}{below + drives}"
            findings.append(
                Finding(
                    "warning",
                    "batch-not-split",
                    f"a batch of {size} cannot be split evenly over {drives} devices",
                    where=path,
                    why="each of them would compute all of it, which is no faster than one device",
                    fix=fix,
                )
            )
        elif drives > 1:
            size, reason = size // drives, f"{size} / {drives} devices; {reason}"
        settings["batch_per_device"] = Setting(size, reason)
        settings["global_batch"] = Setting(batch.samples, str(batch))
        if (change := lr_setting(trainer, batch)) is not None:
            settings["lr_factor"] = change
    elif trainer.base_batch_size is not None:
        settings["lr_factor"] = Setting(None, "the batch size is seen at the start")
    return CheckResult(tuple(findings), settings)


def _spec(job: JobConfig) -> ClassSpec | None:
    spec: ClassSpec | None = getattr(job, job.trainer.batch_size_from.partition(".")[0])
    return spec


def _default(loaded: LoadedJob, job: JobConfig) -> int | None:
    """The default of the argument in the user's class, as its source says."""
    spec, name = _spec(job), job.trainer.batch_size_from.split(".")[2:]
    if spec is None or len(name) != 1 or name[0] in spec.args:
        return None
    found = find_callable(spec.class_, loaded.root)
    if not isinstance(found, CallableInfo) or found.signature is None or name[0] not in found.signature.parameters:
        return None
    text = found.signature.parameters[name[0]].default
    return int(text) if isinstance(text, str) and text.isdecimal() and int(text) else None


def _accumulate(job: JobConfig, resolution: Resolution, cwd: Path) -> int:
    """Batches to an optimizer step, as the start would have them; what is wrong is a finding of another check."""
    if job.run.resume == "auto":
        with suppress(FairleadError):
            data = job.model_dump(mode="json")
            path = run_directory(data, job.run, resolution.job, cwd)
            if same_run(stored_fingerprint(path), fingerprint(data)):
                newest = newest_complete(path / "checkpoints").checkpoint
                return batch_plan(resolution, newest.metadata if newest is not None else None)
    return job.trainer.accumulate_grad_batches
