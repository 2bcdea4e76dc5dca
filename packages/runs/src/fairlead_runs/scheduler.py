"""The status of a run's job by its scheduler, queried from anywhere, with a short timeout."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final, Literal, Protocol, runtime_checkable

from fairlead.plugins import PluginManager
from fairlead_runs.history import read_history
from fairlead_runs.states import RunState
from fairlead_runs.submitted import queued_submission

TIMEOUT_S: Final = 5.0
"""Seconds that a scheduler may take to answer."""
_AT_ONCE: Final = 8


@dataclass(frozen=True)
class JobStatus:
    """What a scheduler says of one job; times are in seconds since the epoch, None where they are not known.

    Attributes:
        state: `queued`: waits, also for a restart; `running`; `ending`: its processes are being ended; `ended`;
            `unknown`: the scheduler does not answer, or has forgotten the job.
        detail: In its own words: `PENDING, BeginTime`.
        why: What that means, in a sentence's rest: `waits until nodes are free`; may be empty.
        starts: When it starts at the earliest, of a job that is queued.
        since: When it was started, of one that runs.
        ends: When its time limit is over, of one that runs.
        restarts: How often it was restarted.
    """

    state: Literal["queued", "running", "ending", "ended", "unknown"]
    detail: str
    why: str = ""
    starts: float | None = None
    since: float | None = None
    ends: float | None = None
    restarts: int | None = None


@runtime_checkable
class JobQueue(Protocol):
    """An environment plugin whose scheduler can be queried about a job from outside of it, as from a login node."""

    def job_status(self, job: str, environ: Mapping[str, str], deadline: float) -> JobStatus:
        """The status of a job of this scheduler, `scheduler:id`.

        One command, until `deadline` on `time.monotonic()`: `fairlead_runs.programs.ask`.
        """

    def job_cancel(self, job: str, *, queued: bool) -> tuple[str, ...]:
        """The command that ends a job, as words; `queued`: only if it has not begun, where the scheduler can tell."""


@runtime_checkable
class ListedQueue(JobQueue, Protocol):
    """A `JobQueue` whose scheduler is asked about many jobs by one command, as `fairlead runs` does."""

    def job_statuses(self, jobs: Sequence[str], environ: Mapping[str, str], deadline: float) -> Mapping[str, JobStatus]:
        """As `job_status`, for each of these jobs."""


def job_of_run(run: Path) -> str | None:
    """The scheduler's job that last started this run, or was submitted since; None: it was started by hand."""
    starts = [event for event in read_history(run / "history.jsonl") if event["event"] == "start"]
    last = starts[-1] if starts else {}
    sent = queued_submission(run)
    if sent is not None and (not last or datetime.fromisoformat(sent.submitted) > datetime.fromisoformat(last["time"])):
        return f"{sent.to}:{sent.id}"
    return str(last["job"]) if last.get("job") else None


def lives(run: RunState, job: str | None, status: JobStatus | None) -> bool:
    """Whether a start of this run is there now: a job that waits, or has ended, has only left its lock behind."""
    if (
        status is not None
        and status.state in ("queued", "ended")
        and (run.owner is None or (job is not None and run.owner.job == job))
    ):
        return False
    return run.state == "running"


def queue_of(job: str, plugins: PluginManager) -> JobQueue | None:
    """The plugin that asks for a job; None where none of those installed can."""
    scheduler = job.partition(":")[0]
    plugin = plugins.loaded_one("environment", scheduler) if scheduler in plugins.names("environment") else None
    return plugin if isinstance(plugin, JobQueue) else None


def ask_for_job(
    job: str, plugins: PluginManager, environ: Mapping[str, str], timeout_s: float = TIMEOUT_S
) -> JobStatus | None:
    """What the scheduler says of a job; None where no plugin that is installed knows how to ask it."""
    queue = queue_of(job, plugins)
    return None if queue is None else queue.job_status(job, environ, time.monotonic() + timeout_s)


def ask_for_jobs(
    jobs: Mapping[Path, str], plugins: PluginManager, environ: Mapping[str, str], timeout_s: float = TIMEOUT_S
) -> dict[Path, JobStatus]:
    """What the schedulers say of the jobs of several runs, all within this time; others are left out."""
    deadline = time.monotonic() + timeout_s
    by_scheduler: dict[str, list[str]] = {}
    for job in dict.fromkeys(jobs.values()):
        by_scheduler.setdefault(job.partition(":")[0], []).append(job)
    questions: list[Callable[[], Mapping[str, JobStatus]]] = []
    for names in by_scheduler.values():
        queue = queue_of(names[0], plugins)  # loads plugins: not in threads
        if isinstance(queue, ListedQueue) and len(names) > _AT_ONCE:  # it may read all jobs of the cluster
            questions.append(partial(queue.job_statuses, names, environ, deadline))
        elif queue is not None:
            questions += [partial(_ask_one, queue, name, environ, deadline) for name in names]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = {job: status for answer in pool.map(lambda ask: ask(), questions) for job, status in answer.items()}
    return {run: answers[job] for run, job in jobs.items() if job in answers}


def _ask_one(queue: JobQueue, job: str, environ: Mapping[str, str], deadline: float) -> Mapping[str, JobStatus]:
    return {job: queue.job_status(job, environ, deadline)} if time.monotonic() < deadline else {}
