"""How often a run may be restarted: counted in its history, so that requeues end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairlead.config_bases import RequeueConfigBase


@dataclass(frozen=True)
class StartCounts:
    """What a run has used up of its starts, and its ends by reason (`preempted`, `time_limit`, ...) or failure.

    `requeues` count how often Fairlead has restarted the scheduler's job of the last start, `without_progress` the
    starts in a row, the last one included, that saved no new training step.
    """

    requeues: int = 0
    without_progress: int = 0
    stops: Mapping[str, int] | None = None
    failures: int = 0


def count_starts(events: Sequence[Mapping[str, Any]]) -> StartCounts:
    """Counts in the events of a history, oldest first."""
    requeues, idle, failures = 0, 0, 0
    stops: dict[str, int] = {}
    job: Any = None
    starts = [index for index, event in enumerate(events) if event["event"] == "start"]
    for index, begin in enumerate(starts):
        during = events[begin : starts[index + 1]] if index + 1 < len(starts) else events[begin:]
        if during[0].get("job") != job:  # a person has resubmitted it
            requeues, idle, job = 0, 0, during[0].get("job")
        requeues += sum(event["event"] == "requeue" for event in during)
        failures += any(event["event"] == "failed" for event in during)
        for event in during:
            if event["event"] == "stop" and event.get("reason"):
                stops[str(event["reason"])] = stops.get(str(event["reason"]), 0) + 1
        idle = 0 if _progressed(during) else idle + 1
    return StartCounts(requeues, idle, stops, failures)


def refusal(config: RequeueConfigBase, events: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the run is not to be started once more, None when it is; `events` include this stop or its checkpoint."""
    used = count_starts(events)
    if config.max_requeues is not None and used.requeues >= config.max_requeues:
        return f"it was restarted {used.requeues} times, and max_requeues is {config.max_requeues}"
    if config.max_without_progress is not None and used.without_progress >= config.max_without_progress:
        return (
            f"its last {used.without_progress} starts took no training step, and max_without_progress is "
            f"{config.max_without_progress}"
        )
    return None


def _progressed(during: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a start saved a step that it had not begun with."""
    begun = next((event.get("step") for event in during if event["event"] == "training"), None)
    saved = [event["step"] for event in during if event["event"] == "checkpoint" and isinstance(event.get("step"), int)]
    return isinstance(begun, int) and max(saved, default=begun) > begun
