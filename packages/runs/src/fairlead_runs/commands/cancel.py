"""`fairlead cancel`: ends a run with nothing lost, or at once."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import time
from pathlib import Path
from typing import Final

from fairlead.cli.session import Session
from fairlead.errors import RunDirectoryError, RunFailedError
from fairlead_runs import RunState, read_history, state
from fairlead_runs.commands.texts import find_run
from fairlead_runs.commit import LockOwner
from fairlead_runs.commit.files import disk_error
from fairlead_runs.programs import attempt, find
from fairlead_runs.scheduler import JobStatus, ask_for_job, job_of_run, lives, queue_of
from fairlead_runs.switches import STOP, find_switch

_TIMEOUT: Final = 30.0  # seconds that the scheduler may take to end a job


def cancel_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead cancel`."""
    parser.add_argument("run", metavar="RUN", help="a run directory, or the name of one in runs/")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--save",
        action="store_true",
        help="stop with a checkpoint after the next step, however long that takes (default)",
    )
    how.add_argument(
        "--now",
        action="store_true",
        help="stop by the scheduler's command, or SIGTERM here; saves only if the grace time is long enough",
    )


def run_cancel(arguments: argparse.Namespace, session: Session) -> int:
    """Ends a run, and says how; nothing to end is no error."""
    run = state(find_run(arguments.run, session, or_sweep=True))
    job = job_of_run(run.path) if run.state != "finished" else None
    status = ask_for_job(job, session.plugins, session.environ) if job is not None else None
    starting = status is not None and status.state in ("running", "ending")
    here = starting or lives(run, job, status)
    if here and arguments.now:
        session.print(_now(run, job, session))
    elif here:
        session.print(_stop(run))
    elif job is not None and _may_start(run, status):
        session.print(_queued(run, job, status, session))
    else:
        reason = f" ({run.reason})" if run.reason else ""
        ended = f"the job of {run.name} has ended" if run.state == "running" else f"{run.name} is {run.state}{reason}"
        session.print(f"{ended}: there is nothing to cancel")
    return 0


def _may_start(run: RunState, status: JobStatus | None) -> bool:
    """Whether the job of the last start may be restarted."""
    if status is not None and status.state in ("queued", "ended"):
        return status.state == "queued"
    return any(event["event"] == "requeue" for event in read_history(run.path / "history.jsonl")[-1:])


def _stop(run: RunState) -> str:
    """Asks by the file: unlike a signal it wants no other start, and unlike `scancel` it does not hurry."""
    there = find_switch(run.path, STOP)
    if there is not None:
        return f"{there} already, {max(0, int(time.time() - there.time))} s ago: `fairlead status {run.name}` shows it"
    _make(run.path)
    return (
        f"{run.name} stops after its next step, with a checkpoint, and does not restart: requested by {run.path / STOP}"
    )


def _make(run: Path) -> None:
    try:
        os.close(os.open(run / STOP, os.O_WRONLY | os.O_CREAT, 0o666))
    except PermissionError as error:
        raise RunDirectoryError(
            "the run cannot be stopped: you may not write into its directory",
            where=str(run),
            why=error.strerror,
            fix=f"have its owner run `fairlead cancel {run.name}`, or open it to your group: chmod g+w {run}",
        ) from error
    except OSError as error:
        raise disk_error(error, "the run cannot be stopped", run / STOP, RunDirectoryError) from error


def _queued(run: RunState, job: str, status: JobStatus | None, session: Session) -> str:
    """A job that waits has nothing to save: the scheduler forgets it, or else its next start stops at once."""
    queue = queue_of(job, session.plugins)
    why = status.detail if status is not None and status.state == "unknown" else f"no plugin here can end {job}"
    if queue is not None and status is not None and status.state == "queued":
        words = queue.job_cancel(job, queued=True)
        refused = _run(words, session)
        if refused is None:
            return f"{run.name} was queued, and is not any more: {shlex.join(words)}"
        why = f"{shlex.join(words)}: {refused}"
    _make(run.path)
    return f"{why}\nso {run.path / STOP} asks its next start to stop before it trains"


def _now(run: RunState, job: str | None, session: Session) -> str:
    queue = queue_of(job, session.plugins) if job is not None else None
    if job is not None and queue is not None:
        words = queue.job_cancel(job, queued=False)
    elif run.owner is not None and run.owner.cancel is not None:
        words = tuple(shlex.split(run.owner.cancel))
    elif run.owner is not None:
        return _signal(run, run.owner)
    else:
        raise RunFailedError(f"it is not known who runs {run.name}", where=str(run.path), fix="leave --now out")
    refused = _run(words, session)
    if refused is not None:
        raise RunFailedError(
            "the job is not ended", where=shlex.join(words), why=refused, fix="leave --now out: a file asks it to stop"
        )
    return f"ended by {shlex.join(words)}: it saves if the scheduler's time of grace is long enough"


def _signal(run: RunState, owner: LockOwner) -> str:
    me = LockOwner.here()
    if (owner.host, owner.boot) != (me.host, me.boot):
        raise RunFailedError(
            f"{run.name} runs on {owner.host}, in no job of a scheduler: no signal reaches it from here",
            where=f"process {owner.pid}",
            fix="run this there, or leave --now out: a file asks it to stop",
        )
    try:
        os.kill(owner.pid, signal.SIGTERM)
    except PermissionError as error:
        raise RunFailedError(
            f"process {owner.pid} belongs to {owner.user}",
            why=error.strerror,
            fix="leave --now out: a file asks it to stop",
        ) from error
    except ProcessLookupError:
        return f"process {owner.pid} has just ended"
    return f"SIGTERM to process {owner.pid}, which saves and stops"


def _run(words: tuple[str, ...], session: Session) -> str | None:
    """Why a command of the scheduler has not done it; None: it has."""
    program = find(words[0], session.environ)
    if program is None:
        return f"{words[0]} is not on the PATH"
    done = attempt([program, *words[1:]], _TIMEOUT, session.environ)
    if done.code == 0:
        return None
    return done.message or (f"exit code {done.code}" if done.code is not None else f"no answer within {_TIMEOUT:.0f} s")
