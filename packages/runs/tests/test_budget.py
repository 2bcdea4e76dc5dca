"""How often a run may be started again, counted in its history."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from fairlead.config_bases import RequeueConfigBase
from fairlead_runs import count_starts, refusal


class Config(RequeueConfigBase):
    name: Literal["test"] = "test"


def begun(job: str | None = "slurm:7", *, step: int | None = 0) -> list[dict[str, Any]]:
    """A start, and that it took up the training at a step."""
    training = [] if step is None else [{"event": "training", "step": step}]
    return [{"event": "start", "job": job}, *training]


def stopped(step: int, reason: str = "preempted", *, requeued: bool = True) -> list[dict[str, Any]]:
    """A stop with a checkpoint of this step."""
    saved = [{"event": "checkpoint", "step": step}, {"event": "stop", "reason": reason, "step": step}]
    return [*saved, *([{"event": "requeue"}] if requeued else [])]


def test_preemptions_and_failures_are_counted_apart() -> None:
    failed = [*begun(step=9), {"event": "failed"}]
    events = [*begun(), *stopped(5), *begun(step=5), *stopped(9, "time_limit"), *failed, *begun(step=9)]
    used = count_starts(events)
    assert (used.requeues, used.failures) == (2, 1)
    assert used.stops == {"preempted": 1, "time_limit": 1}


@pytest.mark.parametrize(("most", "refused"), [(None, False), (3, False), (2, True), (0, True)])
def test_a_budget_of_requeues(most: int | None, refused: bool) -> None:
    events = [*begun(), *stopped(5), *begun(step=5), *stopped(9), *begun(step=9), {"event": "checkpoint", "step": 12}]
    assert (refusal(Config(max_requeues=most), events) is not None) is refused


def test_a_job_that_a_person_submits_begins_to_count_anew() -> None:
    """Else a run that has used up its budget could never be preempted again."""
    events = [*begun(), *stopped(5), *begun(step=5), *stopped(9, requeued=False), *begun("slurm:8", step=9)]
    assert count_starts(events).requeues == 0


def test_starts_without_a_step() -> None:
    """Stopped before the training, or with the step they had begun with; one that gets on begins the count anew."""
    idle = [*begun(step=5), *stopped(5), *begun(step=None), {"event": "stop"}, {"event": "requeue"}, *begun(step=5)]
    config = Config(max_without_progress=3)
    assert count_starts([*begun(), *stopped(5), *idle]).without_progress == 3
    assert refusal(config, [*begun(), *stopped(5), *idle]) is not None
    assert refusal(config, [*begun(), *stopped(5), *idle, {"event": "checkpoint", "step": 6}]) is None
    assert refusal(Config(max_without_progress=None), idle) is None


def test_an_empty_history_refuses_nothing() -> None:
    assert refusal(Config(), []) is None
