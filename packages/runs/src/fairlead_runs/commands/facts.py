"""What `fairlead status` says of a run above its ranks: its job in the scheduler, its pace, its saves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

from fairlead_runs import RunState
from fairlead_runs.commands.texts import ago, metric, or_dash
from fairlead_runs.monitoring import scraped_at
from fairlead_runs.pace import Pace
from fairlead_runs.scheduler import JobStatus, RunJob, lives
from fairlead_runs.switches import SAVE, STOP, find_switch


def shown_state(run: RunState, job: RunJob | None, status: JobStatus | None) -> tuple[str, str]:
    """The state of a run and why, by its directory and by what its scheduler says of its job.

    `queued` is one whose job waits to start, or to start again, and `starting` one whose job runs and has yet to begin
    the run: imports take a while. Else it is the last start's state.
    """
    if run.state == "running" and run.reason == "starting":
        return "starting", ""
    if status is None or lives(run, job, status):
        return run.state, run.reason
    last = (run.state, run.reason)
    if run.state == "running" and status.state == "ended":
        last = ("interrupted", f"its job has ended: {status.detail}")
    elif run.state == "running":
        last = ("interrupted", "exited without an error report")
    ended = last[1] if run.state == "running" else _with_reason(*last)
    before = f"its last start: {ended}" if run.starts else "it has not started yet"
    if status.state == "queued":
        return "queued", before
    if status.state == "running" and _begins(run, status):
        return "starting", before if run.starts else ""
    if not run.starts and status.state == "ended":
        return "unknown", f"its job ended before it started: {status.detail}"
    return last


def _begins(run: RunState, status: JobStatus) -> bool:
    """Whether a job that runs was started after the run's last start, or the run was never started."""
    return run.started is None or (status.since is not None and status.since > run.started.timestamp())


def _with_reason(state: str, reason: str) -> str:
    return state + (f" ({reason})" if reason else "")


def headline(run: RunState, job: RunJob | None, status: JobStatus | None) -> str:
    """The run's name and state."""
    state, reason = shown_state(run, job, status)
    if state in ("queued", "starting"):
        return f"{run.name}: {state}" + (f"; {reason}" if reason else "")
    return f"{run.name}: {_with_reason(state, reason)}"


def facts(run: RunState, how: Pace, job: RunJob | None, status: JobStatus | None, now: float) -> dict[str, str]:
    """The lines, by their names."""
    of = f" of {how.max_steps}" if how.max_steps is not None else ""
    lines = {
        "directory": str(run.path),
        "starts": str(run.starts),
        "step": f"{or_dash(run.step)}{of}",
        "metrics": metric(run.metrics),
    }
    here = lives(run, job, status)
    if run.owner is not None and here:
        lines["held by"] = f"{run.owner.host}, process {run.owner.pid}"
    if here and run.started is not None:
        started = run.started.timestamp()
        lines["running"] = f"since {_clock(started, now)}, for {in_words(now - started)}"
    if job is not None:
        name = status.job if status is not None and status.job is not None else job.id
        chain = f" of the chain {job.chain}" if job.chain is not None else ""
        lines["job"] = f"{name}{chain}: {'; '.join(_job(status, now))}"
    if how.steps_per_s is not None:
        speed = f"{how.steps_per_s:.3g} steps/s" if how.steps_per_s >= 0.1 else f"{1 / how.steps_per_s:.3g} s/step"
        left = f", {in_words(how.left_s)} to step {how.max_steps}" if how.left_s and here else ""
        lines["speed"] = speed + left
    if how.saved_step is not None or how.next_save_s is not None:
        lines["saved"] = "; ".join(_saves(how, now, here=here))
    if here and (address := scraped_at(run.path)) is not None:
        lines["scraped"] = address
    switches = [find_switch(run.path, name) for name in (STOP, SAVE)]
    if wanted := [str(switch) for switch in switches if switch is not None]:
        lines["asked"] = ", ".join(wanted) + (": not seen yet" if here else ": the next start heeds it")
    return lines


def in_words(seconds: float) -> str:
    """How long, as `ago` says how long ago."""
    return ago(seconds).removesuffix(" ago")


def _job(status: JobStatus | None, now: float) -> Iterator[str]:
    if status is None:
        yield "no plugin here knows how to ask for it"
        return
    yield f"{status.state} ({status.detail})" if status.detail else status.state
    if status.why:
        yield status.why
    if status.starts is not None:
        yield f"not before {_clock(status.starts, now)}, in {in_words(status.starts - now)}"
    if status.ends is not None:
        yield f"its time limit is at {_clock(status.ends, now)}, in {in_words(status.ends - now)}"
    if status.restarts:
        yield f"restarted {status.restarts} time{'s' if status.restarts > 1 else ''}"


def _saves(how: Pace, now: float, *, here: bool) -> Iterator[str]:
    if how.saved_step is not None:
        yield f"step {how.saved_step}, {ago(now - how.saved_at) if how.saved_at is not None else 'some time ago'}"
    else:
        yield "nothing yet"
    if here and (how.next_save is not None or how.next_save_s is not None):
        at = f" at step {how.next_save}" if how.next_save is not None else ""
        yield f"next{at}" + (f" in {in_words(how.next_save_s)}" if how.next_save_s is not None else "")


def _clock(when: float, now: float) -> str:
    """A time of day; with the date where it is not today's."""
    at = datetime.fromtimestamp(when)
    return f"{at:%H:%M:%S}" if time.localtime(now)[:3] == time.localtime(when)[:3] else f"{at:%Y-%m-%d %H:%M}"
