"""One fit's part in a run: which directory, which start, which checkpoint; decided once for all ranks."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException

from fairlead.bases import CheckpointIOConfigBase
from fairlead.commit import Checkpoint, LockOwner, Syscalls, discard_incomplete, newest_complete, verify
from fairlead.commit.files import remove_tree
from fairlead.config import JobConfig, RunConfig
from fairlead.errors import CheckpointError, FairleadError, RunDirectoryError
from fairlead.interfaces import CheckpointCopies
from fairlead.remote import fetch, is_url, split_checkpoint_url
from fairlead.resolve import Resolution
from fairlead.run import (
    Heartbeat,
    History,
    RunDirectory,
    array_task,
    collect_provenance,
    fingerprint,
    origin,
    render_name,
    run_path,
    scheduler_job,
)
from fairlead.run.fingerprints import limits
from fairlead_lightning.batch import batch_plan
from fairlead_lightning.process_group import shared
from fairlead_lightning.ranks import HANDOFF, Handoff

__all__ = [
    "STATE_FILE",
    "RunSession",
    "checkpoint_to_evaluate",
    "handed_over",
    "open_session",
    "run_directory",
    "waiting_handoff",
]

STATE_FILE = "state.ckpt"
"""What plain Lightning reads of a checkpoint: a file, or a directory of shards."""
_DOWNLOADS = ".downloads"


@dataclass(frozen=True)
class _Start:
    """Where a start begins from."""

    file: Path | None = None
    own: Checkpoint | None = None
    said: tuple[str, ...] = ()

    def own_metadata(self) -> Mapping[str, Any] | None:
        """The metadata of a checkpoint of Fairlead's; a plain one has none."""
        return self.own.metadata if self.own is not None else None


@dataclass(frozen=True)
class _Decision:
    """What rank 0 tells the others: the run, or why there is none."""

    handoff: Handoff | None
    finished: str | None
    error: FairleadError | None


class RunSession:
    """The run as one rank sees it: rank 0 writes the history, every rank its heartbeat.

    Args:
        handoff: What was decided for all ranks.
        job: The job as plain data.
        rank: This rank, from 0.
        directory: The directory with its lock, in the process that opened it.
        finished: How the run ended, when it has nothing left to do.
        previous: The metadata of the checkpoint that the run goes on from.
        messages: What the user should be told at the start.
    """

    def __init__(
        self,
        handoff: Handoff,
        job: Mapping[str, Any],
        *,
        rank: int = 0,
        directory: RunDirectory | None = None,
        finished: str | None = None,
        previous: Mapping[str, Any] | None = None,
        messages: tuple[str, ...] = (),
    ) -> None:
        self.handoff = handoff
        self.path = Path(handoff.path)
        self.start = handoff.start
        self.checkpoint = Path(handoff.checkpoint) if handoff.checkpoint else None
        self.finished = finished
        self.previous = previous
        self.messages = messages
        self.fingerprint = fingerprint(job).digest
        self._limits = limits(job)
        self._directory = directory
        self._history = History(self.path / "history.jsonl", rank=rank)
        self._rank = rank
        self._heartbeat: Heartbeat | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Spawned ranks get everything but the lock, which stays with the process that holds it."""
        return {**self.__dict__, "_directory": None, "_heartbeat": None}

    @cached_property
    def origin(self) -> Mapping[str, str | None]:
        """The code and the environment of this start, for the manifests of its checkpoints; rank 0 writes them."""
        file = self.path / "starts" / str(self.start) / "provenance.json"
        if self._rank != 0 or not file.exists():  # people tidy up while a job runs
            return {}
        return origin(json.loads(file.read_text(encoding="utf-8")))

    @property
    def token(self) -> str:
        """Names the stages of this start's checkpoints, the same on all ranks."""
        return f"s{self.start}"

    @property
    def resumed(self) -> bool:
        """Whether this start goes on from a checkpoint."""
        return self.checkpoint is not None

    @property
    def resume_step(self) -> int | None:
        """The optimizer step that this run goes on from; None when it begins."""
        step = self.previous.get("step") if self.previous is not None else None
        return int(step) if step is not None else None

    def join(self, rank: int, local_rank: int, node_rank: int) -> None:
        """Says which rank this is, once that is known for sure; opens its heartbeat."""
        self._rank = rank
        self._history = History(self.path / "history.jsonl", rank=rank)
        if self._heartbeat is None:
            folder = RunDirectory(self.path, rank=rank)
            self._heartbeat = folder.heartbeat(node_rank=node_rank, local_rank=local_rank, rank=rank, start=self.start)

    def beat(self, phase: str, step: int) -> None:
        """Says where this rank is; costs microseconds."""
        if self._heartbeat is not None:
            self._heartbeat.beat(phase, step)

    def event(self, name: str, **fields: Any) -> None:
        """Adds a line to the history; ranks other than 0 add only failures.

        A disk that refuses to write is a warning: a record must not end what it records.
        """
        if self._rank != 0 and name not in ("failed", "checkpoint-failed"):
            return
        try:
            self._history.append(name, **fields)
        except RunDirectoryError as error:
            warnings.warn(f"the event {name!r} is not in the history: {error.block()}", stacklevel=2)

    def complete(self, **fields: Any) -> None:
        """Records that the limits of the job were reached."""
        self.event("finished", limits=self._limits, **fields)

    def children_stopped(self, exception: BaseException) -> int | None:
        """The exit code of ranks that this process has spawned, if they have ended as they were asked to."""
        if not isinstance(exception, ProcessExitedException):
            return None
        said = [event["event"] for event in self._history.read()]
        return exception.exit_code if "stop" in said[len(said) - said[::-1].index("start") :] else None

    def close(self) -> None:
        """Releases the run directory; may be called twice."""
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        if self._directory is not None:
            self._directory.close()

    def __enter__(self) -> RunSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


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
    decided = _Decision(session.handoff if session else None, session.finished if session else None, error)
    decided = shared(decided)
    if decided.error is not None:
        raise decided.error
    if session is not None:
        return session
    told = cast("Handoff", decided.handoff)
    return RunSession(told, job, rank=rank, finished=decided.finished, previous=_metadata(told))


def run_directory(job: Mapping[str, Any], run: RunConfig, environ: Mapping[str, str], cwd: Path) -> Path:
    """The run directory that the job alone, and the task of an array, decide."""
    name = render_name(run.name or Path(sys.argv[0]).stem or "run", job)
    return run_path((cwd / run.dir).absolute(), name, array_task(environ))


def checkpoint_to_evaluate(job: JobConfig, environ: Mapping[str, str], cwd: Path, resume: str | None) -> Path | None:
    """The checkpoint that `validate`, `test` and `predict` load: none, unless it is asked for.

    Raises:
        CheckpointError: `auto` was asked for and the run has no complete checkpoint, or PATH does not exist.
    """
    if resume in (None, "never"):
        return None
    if is_url(resume):
        folder = tempfile.mkdtemp(prefix="fairlead-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return _state_file(fetch(str(resume), Path(folder)).path)
    if resume != "auto":
        return _state_file(Path(cwd, str(resume)))
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
            _state_file(Path(file))  # an error before anything is written
    if is_url(given):
        split_checkpoint_url(str(given))
    if copies is not None and run.resume == "auto":
        copies.open(path.name, fingerprint(job))
    if run.resume != "never" and not is_url(given):
        load = Path(given) if given is not None else None
        here = fallback if not is_url(fallback) else None
        batch_plan(resolution, _start_of(path / "checkpoints", load, here).own_metadata())
    task, attempt = scheduler_job(environ)
    owner = LockOwner.here(job=task, attempt=attempt)
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
            load = _downloaded(str(given), directory.path)
        elif is_url(fallback) and newest_complete(directory.checkpoints).checkpoint is None:
            fallback = _downloaded(str(fallback), directory.path)
        begun = _start_of(directory.checkpoints, load, fallback, deep=_compares(resolution.checkpoint_io))
        batch_plan(resolution, begun.own_metadata())  # again: it may have come from elsewhere
        provenance = collect_provenance(environ, code=code)
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


def _downloaded(url: str, run: Path) -> Path:
    """A checkpoint that is not this run's own, beside the run directory until the next start needs another one."""
    folder = run.parent / _DOWNLOADS / run.name
    remove_tree(folder, Syscalls())
    return fetch(url, folder).path


def _newest_start(directory: RunDirectory) -> int:
    """The last start that is known, here or elsewhere: a later one must have a higher number, or it counts as older."""
    newest = newest_complete(directory.checkpoints).checkpoint
    starts = [int(event["start"]) for event in directory.history.read() if event["event"] == "start"]
    return max([*starts, newest.order[0] if newest is not None else 0])


def _start_of(
    checkpoints: Path, load: Path | None, fallback: str | os.PathLike[str] | None, *, deep: bool = False
) -> _Start:
    """`--resume PATH`, else the run's own newest complete checkpoint, else `ckpt_path`, else nothing.

    Args:
        checkpoints: Those of the run.
        load: What was asked for.
        fallback: What a run begins with.
        deep: Compare the checksums of all files, those of other ranks too: what is damaged is passed over.
    """
    if load is not None:
        own = _committed(load)
        if own is not None and (damages := verify(own.path, deep=deep)):
            raise CheckpointError(
                "the checkpoint is damaged",
                where=str(own.path),
                why="\n".join(map(str, damages)),
                fix="name another one; `fairlead checkpoint ls` shows what there is",
            )
        return _Start(_state_file(load), own, (f"starts from {load}",))
    newest = newest_complete(checkpoints, deep=deep)
    skipped = tuple(f"warning: {damage} was skipped, the checkpoint before it is used" for damage in newest.skipped)
    if newest.checkpoint is not None:
        file = newest.checkpoint.path / STATE_FILE
        return _Start(file, newest.checkpoint, (*skipped, f"goes on from {newest.checkpoint.path}"))
    if fallback is not None:
        return _Start(_state_file(Path(fallback)), None, (*skipped, f"starts from {fallback}"))
    return _Start(said=skipped)


def _compares(config: CheckpointIOConfigBase) -> bool:
    """Whether a backend compares checksums when it loads, or the one that it wraps does."""
    inner = getattr(config, "inner", None)
    return _compares(inner) if isinstance(inner, CheckpointIOConfigBase) else bool(getattr(config, "verify", True))


def _state_file(path: Path) -> Path:
    """The file to load: a plain checkpoint, or the state of one of ours."""
    if (path / STATE_FILE).exists():
        return (path / STATE_FILE).absolute()
    if not path.exists():
        raise CheckpointError(
            "the checkpoint does not exist", where=str(path), fix="name a .ckpt file, or a folder under checkpoints/"
        )
    return path.absolute()


def _committed(path: Path) -> Checkpoint | None:
    # The state is a file, or a directory of shards.
    folder = path if path.is_dir() and path.name != STATE_FILE else path.parent
    return Checkpoint.at(folder) if (folder / "manifest.json").exists() else None


def _metadata(handoff: Handoff) -> Mapping[str, Any] | None:
    found = _committed(Path(handoff.checkpoint)) if handoff.checkpoint else None
    return found.metadata if found is not None else None
