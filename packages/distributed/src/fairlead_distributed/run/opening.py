"""Opens the run of a fit: which directory, which start, which checkpoint; decided once for all ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from fairlead.config import JobConfig, RunConfig
from fairlead.detect import find_job
from fairlead.errors import CheckpointError, FairleadError
from fairlead.plugins import default_plugins
from fairlead.resolve import Resolution
from fairlead_distributed.objects import broadcast_object
from fairlead_distributed.run.checksums import check_for, help_to_compare
from fairlead_distributed.run.resume_source import (
    committed,
    compares,
    downloaded,
    downloaded_for_now,
    find_resume_source,
    state_file,
)
from fairlead_distributed.run.session import STATE_FILE, RunSession
from fairlead_runs import (
    RunDirectory,
    collect_provenance,
    fingerprint,
    render_name,
    run_path,
)
from fairlead_runs.batch_policy import batch_plan
from fairlead_runs.checkpoint_io import CheckpointCopies
from fairlead_runs.commit import LockOwner, discard_incomplete, newest_complete
from fairlead_runs.handoff import HANDOFF, Handoff
from fairlead_runs.remote import is_url, split_checkpoint_url

__all__ = ["checkpoint_to_evaluate", "handed_over", "open_session", "run_directory", "waiting_handoff"]


@dataclass(frozen=True)
class _Decision:
    """What rank 0 tells the others: the run, or why there is none."""

    handoff: Handoff | None
    finished: str | None
    error: FairleadError | None


def open_session(
    job: Mapping[str, Any],
    resolution: Resolution,
    run: RunConfig,
    *,
    environ: Mapping[str, str],
    ckpt_path: str | os.PathLike[str] | None = None,
    code: Path | None = None,
    copies: CheckpointCopies | None = None,
) -> RunSession:
    """Opens the run on rank 0 and tells the other ranks; an error on rank 0 is raised on all.

    Args:
        job: The job as plain data.
        resolution: The resolved settings.
        run: Which run, and what to resume from.
        environ: The environment variables.
        ckpt_path: A checkpoint to start from while the run has none of its own.
        code: The folder of the user's code, for the record.
        copies: What keeps copies of the checkpoints elsewhere: the newest is fetched, and this start copies there.

    Raises:
        FairleadError: The run directory cannot be used, or the checkpoint does not exist.
    """
    grouped = dist.is_initialized()
    rank = dist.get_rank() if grouped else 0
    handoff = waiting_handoff(environ)
    if handoff is not None:
        return _taken_over(handoff, job, run, environ)
    session: RunSession | None = None
    error: FairleadError | None = None
    if rank == 0:
        try:
            session = _open(job, resolution, run, environ, ckpt_path, code, copies)
        except FairleadError as raised:
            error = raised
        decided = broadcast_object(
            _Decision(session.handoff if session else None, session.finished if session else None, error)
        )
    else:
        decided = _heard()
    if decided.error is not None:
        raise decided.error
    if session is not None:
        return session
    told = cast("Handoff", decided.handoff)
    return RunSession(told, job, rank=rank, finished=decided.finished, previous=_metadata(told))


def _heard() -> _Decision:
    """What rank 0 decides, after it has had help."""
    while True:
        heard: Any = broadcast_object(None)
        if isinstance(heard, _Decision):
            return heard
        help_to_compare(heard)


def run_directory(job: Mapping[str, Any], run: RunConfig, environ: Mapping[str, str], cwd: Path) -> Path:
    """The run directory that the job alone, and the task of an array, decide."""
    name = render_name(run.name or Path(sys.argv[0]).stem or "run", job)
    return run_path((cwd / run.dir).absolute(), name, find_job(environ, default_plugins()))


def checkpoint_to_evaluate(job: JobConfig, environ: Mapping[str, str], cwd: Path, resume: str | None) -> Path | None:
    """The checkpoint that `validate`, `test` and `predict` load: none, unless it is asked for.

    Raises:
        CheckpointError: `auto` was asked for and the run has no complete checkpoint, or PATH does not exist.
    """
    if resume in (None, "never"):
        return None
    if is_url(resume):
        return state_file(downloaded_for_now(str(resume)))
    if resume != "auto":
        return state_file(Path(cwd, str(resume)))
    path = run_directory(job.model_dump(mode="json"), job.run, environ, cwd)
    newest = newest_complete(path / "checkpoints").checkpoint
    if newest is None:
        raise CheckpointError(
            "this run has no complete checkpoint yet", where=str(path), fix="fit it, or name a checkpoint"
        )
    return newest.path / STATE_FILE


def waiting_handoff(environ: Mapping[str, str]) -> Handoff | None:
    """What rank 0 decided, in a rank that Lightning's launcher started and that has not met the others yet."""
    if dist.is_initialized() or int(environ.get("LOCAL_RANK") or 0) == 0:
        return None  # rank 0 has the variable too, while it starts the others
    return Handoff.from_environ(environ)


@contextmanager
def handed_over(session: RunSession) -> Iterator[None]:
    """While Lightning starts the other ranks from this process, they find the run in their environment.

    When `fairlead fit` has nothing to do it stays there, for ranks that `validate`, `test` or `predict` start later.
    """
    os.environ[HANDOFF] = session.handoff.to_json()
    try:
        yield
    finally:
        if session.finished is None or dist.is_initialized():
            os.environ.pop(HANDOFF, None)


def _taken_over(handoff: Handoff, job: Mapping[str, Any], run: RunConfig, environ: Mapping[str, str]) -> RunSession:
    """The session of a rank that Lightning started from another process, which runs the script from its first line."""
    rank = int(environ.get("LOCAL_RANK", "0"))
    if handoff.asked != _asked(job, run, environ):
        # That process came past this fit without starting ranks, so there was nothing to do.
        path = str(run_directory(job, run, environ, Path.cwd()))
        return RunSession(Handoff(path, 0, None), job, rank=rank, finished="earlier in this script")
    os.environ.pop(HANDOFF, None)  # from now on the ranks are a group
    finished = None if handoff.start else "as rank 0 has said"
    return RunSession(handoff, job, rank=rank, finished=finished, previous=_metadata(handoff))


def _asked(job: Mapping[str, Any], run: RunConfig, environ: Mapping[str, str]) -> str:
    return f"{run.resume} {run_directory(job, run, environ, Path.cwd())}"


def _open(
    job: Mapping[str, Any],
    resolution: Resolution,
    run: RunConfig,
    environ: Mapping[str, str],
    ckpt_path: str | os.PathLike[str] | None,
    code: Path | None,
    copies: CheckpointCopies | None,
) -> RunSession:
    path = run_directory(job, run, environ, Path.cwd())
    given = run.resume if run.resume not in ("auto", "never") else None
    fallback = ckpt_path if ckpt_path is not None else run.ckpt_path
    for file in (given, fallback):
        if file is not None and not is_url(file):
            state_file(Path(file))  # an error before anything is written
    if is_url(given):
        split_checkpoint_url(str(given))
    if copies is not None and run.resume == "auto":
        copies.open(path.name, fingerprint(job))
    if run.resume != "never" and not is_url(given):
        load = Path(given) if given is not None else None
        here = fallback if not is_url(fallback) else None
        batch_plan(resolution, find_resume_source(path / "checkpoints", load, here).own_metadata())
    owner = LockOwner.here(resolution.job)
    directory = RunDirectory.open(path, job=job, fingerprint=fingerprint(job), resume=run.resume, owner=owner)
    if directory.finished is not None:
        text = f"step {directory.finished.get('step')}, {directory.finished.get('time')}"
        newest = newest_complete(directory.checkpoints).checkpoint
        file = str(newest.path / STATE_FILE) if newest is not None else None
        handoff = Handoff(str(directory.path), 0, file, _asked(job, run, environ))
        return RunSession(handoff, job, finished=text, previous=_metadata(handoff))
    try:
        said = _fetched(copies, directory, run, job) if copies is not None else []
        load = directory.load
        if load is not None and is_url(given):
            load = downloaded(str(given), directory.path)
        elif is_url(fallback) and newest_complete(directory.checkpoints).checkpoint is None:
            fallback = downloaded(str(fallback), directory.path)
        check = check_for(deep=compares(resolution.checkpoint_io))
        begun = find_resume_source(directory.checkpoints, load, fallback, check=check)
        batch_plan(resolution, begun.own_metadata())  # again: it may have come from elsewhere
        provenance = collect_provenance(environ, job=resolution.job, code=code)
        start = directory.begin(
            resolution=resolution.as_dict(),
            provenance=provenance,
            world_size=resolution.world_size,
            after=_newest_start(directory),
            resumed_from=str(begun.file) if begun.file else None,
        )
        discard_incomplete(directory.checkpoints, token=directory.token)
        if copies is not None:
            copies.begin(directory.path, start, directory.history.append)
    except BaseException:
        directory.close()
        raise
    said += begun.said
    if directory.code.changed:
        said.append(f"warning[code-changed]: the code changed since the last start: {directory.code.summary}")
    asked = _asked(job, run, environ)
    handoff = Handoff(str(directory.path), start, str(begun.file) if begun.file else None, asked)
    return RunSession(handoff, job, directory=directory, previous=begun.own_metadata(), messages=tuple(said))


def _fetched(copies: CheckpointCopies, directory: RunDirectory, run: RunConfig, job: Mapping[str, Any]) -> list[str]:
    """What a machine that has never seen this run gets of it; what to tell the user."""
    if run.resume != "auto":
        copies.open(directory.path.name, fingerprint(job), new=not directory.continued)
    return copies.fetch(directory.path) if directory.load is None else []


def _newest_start(directory: RunDirectory) -> int:
    """The last start that is known, here or elsewhere: a later one must have a higher number, or it counts as older."""
    newest = newest_complete(directory.checkpoints).checkpoint
    starts = [int(event["start"]) for event in directory.history.read() if event["event"] == "start"]
    return max([*starts, newest.order[0] if newest is not None else 0])


def _metadata(handoff: Handoff) -> Mapping[str, Any] | None:
    found = committed(Path(handoff.checkpoint)) if handoff.checkpoint else None
    return found.metadata if found is not None else None
