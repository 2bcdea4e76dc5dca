"""What the commands about runs share: finding a run, and how its facts are written."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from fairlead.cli.session import Session
from fairlead.errors import ConfigError, did_you_mean
from fairlead_runs import RunState, is_run, list_runs
from fairlead_runs.describe import counted, shown_path
from fairlead_runs.monitoring import scraped_at
from fairlead_runs.pace import Pace
from fairlead_runs.scheduler import JobStatus, lives
from fairlead_runs.states import FINGERPRINT_FILE
from fairlead_runs.submitted import LOCAL, read_submission
from fairlead_runs.switches import SAVE, STOP, find_switch


def find_run(name: str, session: Session, *, or_sweep: bool = False) -> Path:
    """A run directory, or the name of one in `runs/`; `ConfigError` where there is none.

    `or_sweep`: or what the members of a sweep share, which a scheduler has as one job.
    """
    candidates = list(
        dict.fromkeys((session.cwd / name, session.cwd / "runs" / name))
    )  # an absolute path is one of them
    for path in candidates:
        try:
            if is_run(path):
                next(path.iterdir())
                return path
        except PermissionError as error:
            raise ConfigError(
                "you may not read this run",
                where=str(path),
                why=f"it belongs to {_owner(path)}: {error.strerror}",
                fix="ask its owner to let you read it: chmod -R g+rX",
            ) from error
        record = read_submission(path)
        if record is not None and record.index is not None:
            if or_sweep and record.to != LOCAL:
                return path
            raise ConfigError(
                f"{name} is a sweep of {counted(len(record.runs), 'run')}",
                where="RUN",
                why=f"from {Path(record.runs[0]).name} to {Path(record.runs[-1]).name}",
                fix=f"name one of them; fairlead runs {shown_path(path, session.cwd)} lists them",
            )
    folder = session.cwd / "runs"
    known = [run.name for run in list_runs(folder)] if folder.is_dir() else []
    near = did_you_mean(name, known)
    raise ConfigError(
        f"there is no run {name!r}",
        where="RUN",
        why="; ".join(_why_no_run(path) for path in candidates),
        fix=f"did you mean {near!r}?" if near else "`fairlead runs DIR` lists the runs of a folder",
    )


def _why_no_run(path: Path) -> str:
    return f"{path} is no run: it has no {FINGERPRINT_FILE}" if path.is_dir() else f"there is no {path}"


def _owner(path: Path) -> str:
    for folder in (path, *path.parents):
        try:
            return folder.owner()
        except (OSError, KeyError):  # its folder may not be read either; or a user without a name
            continue
    return "another user"


def summary(run: RunState) -> dict[str, Any]:
    """A run as JSON has it."""
    return {
        "name": run.name,
        "path": str(run.path),
        "state": run.state,
        "reason": run.reason,
        "step": run.step,
        "metrics": dict(run.metrics),
        "best": asdict(run.best) if run.best is not None else None,
        "starts": run.starts,
        "started": run.started.isoformat() if run.started else None,
        "heartbeat_age_s": run.heartbeat_age_s,
    }


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of cells as lines with columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def or_dash(value: object) -> str:
    """A value, or a dash where there is none."""
    return "-" if value is None else str(value)


def metric(metrics: Mapping[str, Any]) -> str:
    """The metric that a run is judged by: a validation loss if there is one, else the first."""
    name = next((n for n in ("val/loss", "val_loss") if n in metrics), next(iter(metrics), None))
    if name is None:
        return "-"
    value = metrics[name]
    return f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"


def ago(seconds: float | None) -> str:
    """How long ago something was; a clock that is ahead makes it now, not the future."""
    if seconds is None:
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{max(0, int(seconds))} s ago"


def shown_state(run: RunState, job: str | None, status: JobStatus | None) -> tuple[str, str]:
    """The state of a run and why, by its directory and by what its scheduler says of its job.

    `queued` is one whose job waits to start, or restart, and `starting` one whose job runs and has yet to begin
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


def headline(run: RunState, job: str | None, status: JobStatus | None) -> str:
    """The run's name and state."""
    state, reason = shown_state(run, job, status)
    if state in ("queued", "starting"):
        return f"{run.name}: {state}" + (f"; {reason}" if reason else "")
    return f"{run.name}: {_with_reason(state, reason)}"


def facts(run: RunState, how: Pace, job: str | None, status: JobStatus | None, now: float) -> dict[str, str]:
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
        lines["job"] = f"{job}: {'; '.join(_job(status, now))}"
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
