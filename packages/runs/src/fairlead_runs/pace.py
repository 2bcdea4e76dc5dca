"""How fast a run is, how far it has to go, and what is saved: from its directory alone."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fairlead import yaml
from fairlead.errors import FairleadError
from fairlead_runs.heartbeat import Beat
from fairlead_runs.history import read_history
from fairlead_runs.states import RunState

_LEAST_S: Final = 10.0
"""Seconds over which a speed is measured at least, where the start is that old."""


@dataclass(frozen=True)
class Pace:
    """What is known of a run's progress; None: not known.

    Attributes:
        steps_per_s: Optimizer steps a second of the last start, since its last checkpoint if that is a while ago; with
            all that lies between two steps.
        max_steps: The job's limit.
        left_s: Seconds to that limit at this speed.
        saved_step: The step of the newest checkpoint, and when it was written, in seconds since the epoch.
        saved_at: When that was.
        next_save: The step of the next checkpoint, where the job saves by steps.
        next_save_s: Seconds to it, or to the next one by the clock.
    """

    steps_per_s: float | None = None
    max_steps: int | None = None
    left_s: float | None = None
    saved_step: int | None = None
    saved_at: float | None = None
    next_save: int | None = None
    next_save_s: float | None = None


def pace(run: RunState, now: float) -> Pace:
    """The pace of a run; reads its history and its job."""
    events = read_history(run.path / "history.jsonl")
    trainer = trainer_settings(run.path)
    saved = _last(events, "checkpoint")
    rate = speed(events, run.ranks)
    limit, step = _integer(trainer.get("max_steps")), run.step
    checkpoint = trainer.get("checkpoint")
    every = _integer(checkpoint.get("every_n_steps")) if isinstance(checkpoint, dict) else None
    minutes = checkpoint.get("every_n_minutes") if isinstance(checkpoint, dict) else None
    following = (step // every + 1) * every if every and step is not None else None
    due = [(following - step) / rate] if following is not None and step is not None and rate else []
    if isinstance(minutes, int | float) and (began := _time(saved) or _time(_last(events, "training"))) is not None:
        due.append(max(0.0, began + minutes * 60 - now))
    return Pace(
        rate,
        limit,
        max(0, limit - step) / rate if limit is not None and step is not None and rate else None,
        saved.get("step"),
        _time(saved),
        following,
        min(due, default=None),
    )


def speed(events: Sequence[Mapping[str, Any]], ranks: Sequence[Beat]) -> float | None:
    """Steps a second, between an event of this start that has a step, and the last beat of the rank that is furthest.

    None: there is no such event, or no step since.
    """
    if not ranks:
        return None
    last = max(ranks, key=lambda beat: (beat.step, -beat.time))
    first = max((i for i, event in enumerate(events) if event["event"] == "start"), default=len(events))
    marks = [event for event in events[first:] if event["event"] in ("training", "checkpoint")]
    found: float | None = None
    for event in marks:  # the last that is long enough ago; else the first
        since, step = _time(event), event.get("step")
        if since is None or not isinstance(step, int) or last.time <= since or last.step <= step:
            continue
        if found is None or last.time - since >= _LEAST_S:
            found = (last.step - step) / (last.time - since)
    return found


def _last(events: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    return next((event for event in reversed(events) if event["event"] == name), {})


def trainer_settings(path: Path) -> Mapping[str, Any]:
    """The section `trainer` of a run's job; empty where it cannot be read."""
    try:
        job = yaml.load_file(path / "job.yaml").data
    except FairleadError:  # a run that never began, or a damaged file
        return {}
    trainer = job.get("trainer") if isinstance(job, dict) else None
    return trainer if isinstance(trainer, dict) else {}


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _time(event: Mapping[str, Any]) -> float | None:
    try:
        return datetime.datetime.fromisoformat(str(event.get("time"))).timestamp()
    except ValueError:
        return None
