"""What the scheduler of a run's job says of it, asked from anywhere: once, and not for long."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, Literal, Protocol, runtime_checkable

from fairlead.plugins import PluginManager
from fairlead_runs.history import read_history
from fairlead_runs.states import RunState
from fairlead_runs.submitted import read_submission

TIMEOUT_S: Final = 5.0
"""Seconds that a scheduler may take to answer."""
_AT_ONCE: Final = 8


@dataclass(frozen=True)
class JobStatus:
    """What a scheduler says of one job; times are in seconds since the epoch, None where they are not known.

    Attributes:
        state: `queued`: waits, also to be started again; `running`; `ending`: its processes are being ended; `ended`;
            `unknown`: the scheduler does not answer, or has forgotten the job.
        detail: In its own words: `PENDING, BeginTime`.
        why: What that means, in a sentence's rest: `waits until nodes are free`; may be empty.
        starts: When it starts at the earliest, of a job that is queued.
        since: When it was started, of one that runs.
        ends: When its time limit is over, of one that runs.
        restarts: How often it was started again.
        job: Which job it is, as a `Job.id`, where that is another one of a chain than was asked for.
    """

    state: Literal["queued", "running", "ending", "ended", "unknown"]
    detail: str
    why: str = ""
    starts: float | None = None
    since: float | None = None
    ends: float | None = None
    restarts: int | None = None
    job: str | None = None


@dataclass(frozen=True)
class RunJob:
    """The scheduler's job that last started a run, as `Job.id` has it, and the chain of jobs that it belongs to."""

    id: str
    chain: str | None = None


@runtime_checkable
class JobQueue(Protocol):
    """An environment plugin whose scheduler can be asked for a job from outside of it, as from a login node."""

    def job_status(self, job: RunJob, environ: Mapping[str, str], deadline: float) -> JobStatus:
        """What it says of a job of this scheduler, or of the one of its chain that runs or is next.

        One command, until `deadline` on `time.monotonic()`: `fairlead_runs.programs.ask`.
        """

    def job_cancel(self, job: RunJob, *, queued: bool) -> tuple[str, ...]:
        """The command that ends a job and its chain, as words; `queued`: only what has not begun, if it can do that."""


def job_of_run(run: Path) -> RunJob | None:
    """The scheduler's job that last started this run, or was submitted since; None: it was started by hand."""
    starts = [event for event in read_history(run / "history.jsonl") if event["event"] == "start"]
    last = starts[-1] if starts else {}
    sent = read_submission(run)
    if sent is not None and (not last or datetime.fromisoformat(sent.submitted) > datetime.fromisoformat(last["time"])):
        return RunJob(f"{sent.to}:{sent.id}")
    return RunJob(str(last["job"]), last.get("chain")) if last.get("job") else None


def lives(run: RunState, job: RunJob | None, status: JobStatus | None) -> bool:
    """Whether a start of this run is there now: a job that waits, or has ended, has only left its lock behind."""
    if (
        status is not None
        and status.state in ("queued", "ended")
        and (run.owner is None or (job is not None and run.owner.job == job.id))
    ):
        return False
    return run.state == "running"


def queue_of(job: RunJob, plugins: PluginManager) -> JobQueue | None:
    """The plugin that asks for a job; None where none of those installed can."""
    scheduler = job.id.partition(":")[0]
    plugin = plugins.loaded_one("environment", scheduler) if scheduler in plugins.names("environment") else None
    return plugin if isinstance(plugin, JobQueue) else None


def ask_for_job(
    job: RunJob, plugins: PluginManager, environ: Mapping[str, str], timeout_s: float = TIMEOUT_S
) -> JobStatus | None:
    """What the scheduler says of a job; None where no plugin that is installed knows how to ask it."""
    queue = queue_of(job, plugins)
    return None if queue is None else queue.job_status(job, environ, time.monotonic() + timeout_s)


def ask_for_jobs(
    jobs: Mapping[Path, RunJob], plugins: PluginManager, environ: Mapping[str, str], timeout_s: float = TIMEOUT_S
) -> dict[Path, JobStatus]:
    """What the schedulers say of the jobs of several runs, all within this time; others are left out."""
    deadline = time.monotonic() + timeout_s
    queues = {run: queue_of(job, plugins) for run, job in jobs.items()}  # loads plugins: not in threads

    def ask(run: Path) -> JobStatus | None:
        queue = queues[run]
        late = queue is None or time.monotonic() >= deadline
        return None if late or queue is None else queue.job_status(jobs[run], environ, deadline)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = dict(zip(jobs, pool.map(ask, jobs), strict=True))
    return {run: answer for run, answer in answers.items() if answer is not None}
