"""Opens the run of a fit: which directory, which start, which checkpoint; decided once for all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fairlead.config import RunConfig
from fairlead.errors import ConfigError, FairleadError, RunFailedError
from fairlead.findings import Finding
from fairlead.hooks import answer
from fairlead.plugins import default_plugins
from fairlead.resolve import Resolution
from fairlead_distributed.objects import broadcast_object
from fairlead_distributed.run.proof import RankProof
from fairlead_distributed.run.resume_source import (
    check_for,
    committed,
    compares,
    downloaded,
    downloaded_for_now,
    find_resume_source,
    help_to_compare,
    state_file,
)
from fairlead_distributed.run.session import STATE_FILE, RunSession
from fairlead_launch.reports import leave_to_rank_0
from fairlead_runs import RunDirectory, collect_provenance, fingerprint
from fairlead_runs.batch_size import batch_plan
from fairlead_runs.checkpoint_interval import interval_finding
from fairlead_runs.checkpoint_io import CheckpointCopies
from fairlead_runs.commit import LockOwner, named_checkpoint, newest_complete
from fairlead_runs.handoff import HANDOFF, Handoff
from fairlead_runs.naming import run_directory
from fairlead_runs.remote import is_url, split_checkpoint_url


def open_session(
    job: Mapping[str, Any],
    resolution: Resolution,
    run: RunConfig,
    *,
    environ: Mapping[str, str],
    ckpt_path: str | os.PathLike[str] | None = None,
    copies: CheckpointCopies | None = None,
) -> RunSession:
    """Opens the run on rank 0 and tells the other ranks; an error on rank 0 is raised on all.

    `ckpt_path` is what a run without checkpoints starts from; of `copies` the newest is fetched, and this start copies
    there.
    """
    proof = RankProof.of(environ)
    if proof is not None:
        run = proof.redirected(run)
        if copies is not None:
            raise ConfigError(
                "a proof would copy its checkpoints to the object store of the run",
                where="--prove-resume",
                fix="leave copy_to, or the remote checkpoint_io, out for the proof",
            )
    session = _opened(job, resolution, run, environ, ckpt_path, copies)
    session.proof = proof
    return session


def _opened(
    job: Mapping[str, Any],
    resolution: Resolution,
    run: RunConfig,
    environ: Mapping[str, str],
    ckpt_path: str | os.PathLike[str] | None,
    copies: CheckpointCopies | None,
) -> RunSession:
    handoff = waiting_handoff(environ)
    if handoff is not None:
        return _taken_over(handoff, job, resolution, run, int(environ["LOCAL_RANK"]))
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank > 0:
        return _session(_heard(), job, rank=rank)
    try:
        session = _open(job, resolution, run, environ, ckpt_path, copies)
    except Exception as error:
        # The others wait for this answer, whatever went wrong here.
        broadcast_object(error if isinstance(error, FairleadError) else _of_rank_0(error))
        raise
    broadcast_object(session.handoff)
    return session


def _of_rank_0(error: Exception) -> FairleadError:
    return RunFailedError(f"rank 0 could not open the run: {type(error).__name__}: {error}")


def _session(handoff: Handoff, job: Mapping[str, Any], **own: Any) -> RunSession:
    """The session of a decision, with what the checkpoint says of itself."""
    found = committed(Path(handoff.checkpoint)) if handoff.checkpoint else None
    return RunSession(handoff, job, previous=found.metadata if found is not None else None, **own)


def _heard() -> Handoff:
    """What rank 0 decides, after it has had help."""
    while True:
        heard: Any = broadcast_object(None)
        if isinstance(heard, Handoff):
            return heard
        if isinstance(heard, FairleadError):
            leave_to_rank_0(heard, dist.get_rank())
            raise heard
        help_to_compare(heard)


def file_to_evaluate(weights: str) -> Path:
    """The file to load of what `weights_to_evaluate` chose; what lies on a store is downloaded for this process."""
    return state_file(downloaded_for_now(weights) if is_url(weights) else Path(weights))


def waiting_handoff(environ: Mapping[str, str]) -> Handoff | None:
    """What rank 0 decided, in a rank that Lightning's launcher started and that has not met the others yet."""
    if dist.is_initialized() or int(environ.get("LOCAL_RANK") or 0) == 0:
        return None  # rank 0 has the variable too, while it starts the others
    return Handoff.from_environ(environ)


@contextmanager
def handed_over(session: RunSession) -> Iterator[None]:
    """While Lightning starts the other ranks from this process, they find the run in their environment.

    It stays there when `fit` has nothing to do, for ranks that `validate`, `test` or `predict` start later.
    """
    os.environ[HANDOFF] = session.handoff.to_json()
    try:
        yield
    finally:
        if session.finished is None or dist.is_initialized():
            os.environ.pop(HANDOFF, None)


def no_run_handed_over(environ: Mapping[str, str]) -> None:
    """Tells ranks that an evaluation is about to start: Lightning connects them, they need not meet by themselves."""
    if not dist.is_initialized() and HANDOFF not in environ:
        os.environ[HANDOFF] = Handoff("", 0, None, finished="no run was begun").to_json()


def _taken_over(
    handoff: Handoff, job: Mapping[str, Any], resolution: Resolution, run: RunConfig, rank: int
) -> RunSession:
    """The session of a rank that Lightning started from another process, which runs the script from its first line."""
    path = run_directory(job, run, resolution.job, Path.cwd())
    if handoff.requested != _request(run, path):
        # That process came past this fit without starting ranks, so there was nothing to do.
        return RunSession(Handoff(str(path), 0, None, finished="earlier in this script"), job, rank=rank)
    os.environ.pop(HANDOFF, None)  # from now on the ranks are a group
    return _session(handoff, job, rank=rank)


def _request(run: RunConfig, path: Path) -> str:
    return f"{run.resume} {path}"


def _ended(environ: Mapping[str, str], owner: LockOwner) -> str | None:
    """How the job of a lock's owner has ended, where its scheduler says so."""
    plugins = default_plugins()
    for plugin in plugins.distinct("environment").values() if owner.job is not None else ():
        with suppress(FairleadError):  # of a plugin that may not be used here
            why = answer(plugins, plugin, "fairlead_over", str, environ=environ, job=owner.job, host=owner.host)
            if why is not None:
                return f"its job {owner.job} has ended: {why}"
    return None


def _open(
    job: Mapping[str, Any],
    resolution: Resolution,
    run: RunConfig,
    environ: Mapping[str, str],
    ckpt_path: str | os.PathLike[str] | None,
    copies: CheckpointCopies | None,
) -> RunSession:
    path = run_directory(job, run, resolution.job, Path.cwd())
    weights = named_checkpoint(run.weights, path, Path()) if run.weights is not None else None
    resume = named_checkpoint(run.resume, path, Path()) if weights is None else "never"
    given = resume if run.load is not None else None
    fallback = (ckpt_path if ckpt_path is not None else run.ckpt_path) if weights is None else None
    for file in (given, fallback, weights):
        if file is not None and not is_url(file):
            state_file(Path(file))  # an error before anything is written
    if is_url(given):
        split_checkpoint_url(str(given))
    last_owner = 0
    if copies is not None and resume == "auto":
        last_owner = copies.open(path.name, fingerprint(job))
    if resume != "never" and not is_url(given):
        load = Path(given) if given is not None else None
        here = fallback if not is_url(fallback) else None
        batch_plan(resolution, find_resume_source(path / "checkpoints", load, here).own_metadata())
    owner = LockOwner.here(resolution.job)
    in_job = resolution.job is not None or resolution.inside_job
    directory = RunDirectory.open(
        path,
        job=job,
        fingerprint=fingerprint(job),
        resume=resume,
        owner=owner,
        wait=run.wait if run.wait is not None else in_job,
        ended=partial(_ended, environ),
    )
    if directory.finished is not None:
        text = f"step {directory.finished.get('step')}, {directory.finished.get('time')}"
        newest = newest_complete(directory.checkpoints).checkpoint
        file = str(newest.path / STATE_FILE) if newest is not None else None
        return _session(Handoff(str(directory.path), 0, file, _request(run, path), text), job)
    try:
        messages: list[str] = []
        if copies is not None:
            if run.resume != "auto":  # a restarted job continues what its first attempt began
                last_owner = copies.open(directory.path.name, fingerprint(job), new=not directory.continued)
            messages += copies.fetch(directory.path) if directory.load is None else []
        load = directory.load
        if load is not None and is_url(given):
            load = downloaded(str(given), directory.path)
        elif is_url(fallback) and newest_complete(directory.checkpoints).checkpoint is None:
            fallback = downloaded(str(fallback), directory.path)
        check = check_for(deep=compares(resolution.checkpoint_io))
        source = find_resume_source(directory.checkpoints, load, fallback, check=check)
        batch_plan(resolution, source.own_metadata())  # rechecked: it may have come from elsewhere
        resumed_from = str(source.file) if source.file else None
        begins = _weights(weights, directory.path) if source.file is None and weights is not None else None
        start = directory.begin(
            resolution=resolution.as_dict(),
            provenance=collect_provenance(environ, job=resolution.job),
            world_size=resolution.world_size,
            after=max(last_owner, _newest_start(directory)),
            resumed_from=resumed_from,
            **({"weights": begins} if begins is not None else {}),
        )
        if copies is not None:
            assert directory.fence is not None
            copies.begin(directory.path, start, directory.history.append, directory.fence)
    except BaseException:
        directory.close()
        raise
    messages += source.messages
    if begins is not None:
        messages.append(f"begins with the weights of {weights}, everything else anew")
    messages += [f"accepted: {change}" for change in directory.accepted]
    if directory.code.changed:
        what = f"the code changed since the last start: {directory.code.summary}"
        messages.append(str(Finding("warning", "code-changed", what)))
    if directory.continued and (interval := interval_finding(directory.path)) is not None:
        messages.append(str(interval))
    handoff = Handoff(str(directory.path), start, resumed_from, _request(run, path), weights=begins)
    return _session(handoff, job, directory=directory, messages=tuple(messages))


def _weights(given: str, run: Path) -> str:
    """The file with the weights that a run begins with."""
    return str(state_file(downloaded(given, run) if is_url(given) else Path(given)))


def _newest_start(directory: RunDirectory) -> int:
    """The start of the newest checkpoint, perhaps one elsewhere: with a lower number, this one would count as older."""
    newest = newest_complete(directory.checkpoints).checkpoint
    return newest.order[0] if newest is not None else 0
