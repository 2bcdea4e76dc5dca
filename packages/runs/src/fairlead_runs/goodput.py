"""Where the time of a run went, over all its starts, and what share of it trained: from its directory alone."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from fairlead_runs.heartbeat import read_heartbeats
from fairlead_runs.history import read_history
from fairlead_runs.states import HISTORY_FILE
from fairlead_runs.step_times import FIRST_STEP, STEP_PARTS, RankTimes, read_times
from fairlead_runs.submitted import submitted_at

QUEUE: Final = "queue"
START_UP: Final = "start-up"
VALIDATION: Final = "validation"
SAVING: Final = "saving"
LOST: Final = "lost work"
OTHER: Final = "other"
COMMUNICATION: Final = "communication"
PARTS: Final = (*STEP_PARTS[:4], COMMUNICATION, "optimizer", "logging", FIRST_STEP, VALIDATION, SAVING)
"""Those of a start that runs, in the order in which they are shown."""
GOOD: Final = ("forward", "backward", "compute", "optimizer", "logging", "data", COMMUNICATION)
"""The parts of steps that count: with them goodput is formed."""

_NAMES: Final = {"validate": VALIDATION, "sanity": VALIDATION, "save": SAVING}
_START: Final = ("setup", "prepare", "restore", "start", "first-batch")


@dataclass(frozen=True)
class StartTimes:
    """One start of a run: when it was, and where its time went.

    Attributes:
        began: Its first event, in seconds since the epoch; `trained`: when the training began, None: never.
        ended: Its last sign of life.
        first_step: The step that it began with; None: it never trained.
        last_step: The last step that it did.
        continued_step: The last of its steps that the run was continued from; what came behind was lost.
        seconds: Seconds by part; together they are `ended - began`.
        ranks: What each of its ranks has measured.
        end: How it ended, as `stop`, `failed`, `finished`; empty: without an error report, or not yet.
        why: Its reason.
    """

    number: int
    began: float
    trained: float | None
    ended: float
    world_size: int | None
    first_step: int | None
    last_step: int | None
    continued_step: int | None
    seconds: Mapping[str, float]
    ranks: Sequence[RankTimes]
    end: str
    why: str


@dataclass(frozen=True)
class Goodput:
    """Where the time of a run went.

    Attributes:
        starts: Its starts, in order.
        waits: Seconds in the queue before each start: from submission, or from the end of the start before.
        seconds: Seconds by part over the full run.
        share: Seconds of steps that count, of the time since the first start began; None: nothing was trained.
    """

    starts: Sequence[StartTimes]
    waits: Sequence[float]
    seconds: Mapping[str, float]

    @property
    def total_s(self) -> float:
        """All of it, with the queue."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float | None:
        """Goodput: the share of the time since the first start that went into steps that count."""
        good = sum(self.seconds.get(part, 0.0) for part in GOOD)
        since = self.total_s - (self.waits[0] if self.waits else 0.0)
        return good / since if good and since > 0 else None


def goodput(run: Path) -> Goodput:
    """Where the time of a run went.

    Example:
        >>> goodput(Path("runs/digits")).share  # doctest: +SKIP
        0.93
    """
    events = timed_events(run)
    numbers = [event["start"] for event in events if event["event"] == "start" and isinstance(event.get("start"), int)]
    beats: dict[int, float] = {}
    for beat in read_heartbeats(run / "heartbeats"):
        beats[beat.start] = max(beats.get(beat.start, 0.0), beat.time)
    own: dict[int, list[Mapping[str, Any]]] = {number: [] for number in numbers}
    for event in events:
        if isinstance(event.get("start"), int) and event["start"] in own:
            own[event["start"]].append(event)
    starts: list[StartTimes] = []
    resumed: int | None = None  # the step with which the next start that trained began
    for number in reversed(numbers):
        starts.insert(0, _one_start(run, number, own[number], beats.get(number), resumed, last=not starts))
        if starts[0].first_step is not None:
            resumed = starts[0].first_step
    waits = [_queued(run, starts[0])] if starts else []
    waits += [max(0.0, later.began - start.ended) for start, later in pairwise(starts)]
    seconds: dict[str, float] = {QUEUE: sum(waits)}
    for start in starts:
        for part, value in start.seconds.items():
            seconds[part] = seconds.get(part, 0.0) + value
    return Goodput(starts, waits, {part: value for part, value in seconds.items() if value > 0})


def _one_start(
    run: Path,
    number: int,
    events: Sequence[Mapping[str, Any]],
    beat: float | None,
    resumed: int | None,
    *,
    last: bool,
) -> StartTimes:
    """`resumed`: the step from which a later start went on, if one did."""
    ranks = read_times(run, number)
    lead = ranks[0] if ranks else None
    times = [event_time(event) for event in events]
    began = times[0]
    ended = max([*times, *([beat] if beat else []), *([lead.time] if lead is not None else [])])
    training = next((event for event in events if event["event"] == "training"), None)
    trained = event_time(training) if training is not None else None
    first = int(training.get("step", 0)) if training is not None else None
    steps = [int(event["step"]) for event in events if isinstance(event.get("step"), int)]
    steps += [lead.step] if lead is not None else []
    done = max(steps, default=None) if first is not None else None
    seconds = _parts(lead, began, ended, trained)
    continued = done
    orderly = last or any(event["event"] in ("signal", "finished") for event in events)
    if done is not None and first is not None and resumed is not None and (resumed < done or not orderly):
        continued = max(first, min(resumed, done))
        saved = [
            event_time(one) for one in events if one["event"] == "checkpoint" and one.get("step", done) <= continued
        ]
        _lose(seconds, (done - continued) / max(1, done - first), ended - max([*saved, trained or began]))
    ending = next((event for event in reversed(events) if event["event"] in ("stop", "failed", "finished")), None)
    facts = next((event for event in events if event["event"] == "start"), {})
    return StartTimes(
        number=number,
        began=began,
        trained=trained,
        ended=ended,
        world_size=facts.get("world_size"),
        first_step=first,
        last_step=done,
        continued_step=continued,
        seconds=seconds,
        ranks=ranks,
        end=str(ending["event"]) if ending is not None else "",
        why=str(ending.get("reason") or ending.get("error") or "") if ending is not None else "",
    )


def _parts(lead: RankTimes | None, began: float, ended: float, trained: float | None) -> dict[str, float]:
    """Seconds of one start by part, as rank 0 has seen them; together they are its time."""
    total = max(0.0, ended - began)
    found: dict[str, float] = {}
    if lead is not None:
        for part, value in lead.seconds.items():
            if part not in _START:
                name = _NAMES.get(part, part if part in (*STEP_PARTS, FIRST_STEP) else OTHER)
                if name in STEP_PARTS and FIRST_STEP not in lead.seconds:
                    name = FIRST_STEP  # which it has not finished
                found[name] = found.get(name, 0.0) + value
        waits = min(lead.facts.get("comm_s", 0.0) * lead.steps, found.get("backward", 0.0) or found.get("compute", 0.0))
        if waits > 0:
            inside = "backward" if found.get("backward") else "compute"
            found[inside] -= waits
            found[COMMUNICATION] = waits
    start_up = max(0.0, (trained if trained is not None else ended) - began)
    measured = sum(found.values())
    if measured + start_up > total:  # rank 0 joins before it is connected, and clocks differ a little
        start_up = max(0.0, total - measured)
    found[START_UP] = start_up
    found[OTHER] = found.get(OTHER, 0.0) + max(0.0, total - measured - start_up)
    return {part: value for part, value in found.items() if value > 0}


def _lose(seconds: dict[str, float], share: float, lost: float) -> None:
    """Books what no later start went on from as lost: that share of all that is in steps, and what is left of `lost`.

    What is left is the time in which nothing moved, as before a hang was noticed.
    """
    gone = 0.0
    for part in (*GOOD, VALIDATION, SAVING):
        if part in seconds:
            gone += seconds[part] * share
            seconds[part] *= 1 - share
    still = min(seconds.get(OTHER, 0.0), max(0.0, lost - gone))
    if still:
        seconds[OTHER] -= still
    seconds[LOST] = gone + still


def _queued(run: Path, first: StartTimes) -> float:
    """Seconds from the submission to the first start; 0 where it was not submitted with `fairlead submit`."""
    submitted = submitted_at(run)
    return max(0.0, first.began - submitted) if submitted is not None else 0.0


def timed_events(run: Path) -> list[dict[str, Any]]:
    """The events of a run's history, oldest first; one whose time cannot be read is left out, as of a damaged file."""
    return [event for event in read_history(run / HISTORY_FILE) if _has_time(event)]


def _has_time(event: Mapping[str, Any]) -> bool:
    try:
        event_time(event)
    except (KeyError, ValueError):
        return False
    return True


def event_time(event: Mapping[str, Any]) -> float:
    """When an event of a history was, in seconds since the epoch."""
    return datetime.datetime.fromisoformat(str(event["time"])).timestamp()
