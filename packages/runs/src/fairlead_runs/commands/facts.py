"""What `fairlead status` says of a run above its ranks: its job in the scheduler, its pace, its saves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

from fairlead_runs import RunState
from fairlead_runs.commands.texts import ago, metric, or_dash
from fairlead_runs.pace import Pace
from fairlead_runs.scheduler import JobStatus, RunJob, lives
from fairlead_runs.switches import SAVE, STOP, find_switch


def headline(run: RunState, job: RunJob | None, asked: JobStatus | None) -> str:
    """The run's name and state; one whose job waits to start again is queued, whatever its last start was."""
    said = run.state + (f" ({run.reason})" if run.reason else "")
    if asked is None or lives(run, job, asked):
        return f"{run.name}: {said}"
    ended = (
        f"interrupted (its job has ended: {asked.said})" if asked.state == "ended" else "exited without an error report"
    )
    last = said if run.state != "running" else ended
    if asked.state != "queued":
        return f"{run.name}: {last}"
    return f"{run.name}: queued; " + (f"its last start: {last}" if run.starts else "it has not started yet")


def facts(run: RunState, how: Pace, job: RunJob | None, asked: JobStatus | None, now: float) -> dict[str, str]:
    """The lines, by their names."""
    of = f" of {how.max_steps}" if how.max_steps is not None else ""
    lines = {
        "directory": str(run.path),
        "starts": str(run.starts),
        "step": f"{or_dash(run.step)}{of}",
        "metrics": metric(run.metrics),
    }
    here = lives(run, job, asked)
    if run.owner is not None and here:
        lines["held by"] = f"{run.owner.host}, process {run.owner.pid}"
    if here and run.started is not None:
        started = run.started.timestamp()
        lines["running"] = f"since {_clock(started, now)}, for {in_words(now - started)}"
    if job is not None:
        name = asked.job if asked is not None and asked.job is not None else job.id
        chain = f" of the chain {job.chain}" if job.chain is not None else ""
        lines["job"] = f"{name}{chain}: {'; '.join(_job(asked, now))}"
    if how.steps_per_s is not None:
        speed = f"{how.steps_per_s:.3g} steps/s" if how.steps_per_s >= 0.1 else f"{1 / how.steps_per_s:.3g} s/step"
        left = f", {in_words(how.left_s)} to step {how.max_steps}" if how.left_s and here else ""
        lines["speed"] = speed + left
    if how.saved_step is not None or how.next_save_s is not None:
        lines["saved"] = "; ".join(_saves(how, now, here=here))
    switches = [find_switch(run.path, name) for name in (STOP, SAVE)]
    if wanted := [str(switch) for switch in switches if switch is not None]:
        lines["asked"] = ", ".join(wanted) + (": not seen yet" if here else ": the next start heeds it")
    return lines


def in_words(seconds: float) -> str:
    """How long, as `ago` says how long ago."""
    return ago(seconds).removesuffix(" ago")


def _job(asked: JobStatus | None, now: float) -> Iterator[str]:
    if asked is None:
        yield "no plugin here knows how to ask for it"
        return
    yield f"{asked.state} ({asked.said})" if asked.said else asked.state
    if asked.why:
        yield asked.why
    if asked.starts is not None:
        yield f"not before {_clock(asked.starts, now)}, in {in_words(asked.starts - now)}"
    if asked.ends is not None:
        yield f"its time limit is at {_clock(asked.ends, now)}, in {in_words(asked.ends - now)}"
    if asked.restarts:
        yield f"restarted {asked.restarts} time{'s' if asked.restarts > 1 else ''}"


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
