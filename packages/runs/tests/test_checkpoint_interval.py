"""Which checkpoint interval costs least: formula, simulation, and the runs' own histories."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from fairlead_runs.checkpoint_interval import (
    Costs,
    interval_finding,
    measured,
    measured_costs,
)
from fairlead_runs.step_times import StepTimes, times_folder

CASES = [
    Costs(save_s=5, failure_s=3600, restart_s=120),
    Costs(save_s=60, failure_s=3600, restart_s=600),
    Costs(save_s=1, failure_s=600, restart_s=30),
]


@pytest.mark.parametrize("costs", CASES, ids=lambda costs: f"{costs.failure_s:g}")
def test_the_best_interval_is_better_than_all_others(costs: Costs) -> None:
    best = costs.best_interval()
    assert all(costs.effective(best) >= costs.effective(best * factor) - 1e-4 for factor in (0.2, 0.5, 0.8, 1.25, 2, 5))


def test_a_run_that_never_failed_says_nothing(tmp_path: Path) -> None:
    assert measured_costs(tmp_path) is None
    assert interval_finding(tmp_path) is None


def failed_run(path: Path, *, minutes: int, starts: int = 4, hours: int = 2) -> None:
    """A run that dies every two hours, two minutes of queue and start-up between, and saves so often, for 10 s each."""
    begin = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    clock, step = 0.0, 0
    lines = []

    def event(kind: str, start: int, **fields: object) -> None:
        when = (begin + datetime.timedelta(seconds=clock)).isoformat(timespec="milliseconds")
        lines.append(json.dumps({"time": when, "event": kind, "start": start, "rank": 0, **fields}))

    class Now:
        def __call__(self) -> float:
            return begin.timestamp() + clock

    for start in range(1, starts + 1):
        event("start", start, world_size=8)
        clock += 60
        event("training", start, step=step, epoch=0)
        times = StepTimes(times_folder(path, start), node=0, local_rank=0, rank=0, clock=Now(), now=Now())
        times.beat("first-batch", step)
        times.beat("train", step)
        kept = step
        for minute in range(1, 60 * hours):
            clock += 60
            step += 60
            times.beat("train", step)
            if minute % minutes == 0:
                times.beat("save", step)
                clock += 10
                times.beat("train", step)
                event("checkpoint", start, step=step, seconds=10)
                kept = step
        times.close()
        step = kept
        clock += 60
    (path / "history.jsonl").write_text("\n".join(lines) + "\n")


def test_saving_too_seldom_and_too_often_are_named_with_what_another_interval_would_give(tmp_path: Path) -> None:
    said = {}
    for minutes in (1, 7, 50):
        path = tmp_path / str(minutes)
        path.mkdir()
        failed_run(path, minutes=minutes)
        found = measured_costs(path)
        assert found is not None
        costs, interval = found
        assert costs.save_s == pytest.approx(10, rel=0.05)
        assert costs.failure_s == pytest.approx(3 * 3600, rel=0.25)  # four starts of two hours, of which three failed
        assert costs.restart_s == pytest.approx(180, rel=0.1)  # a minute of queue, one of start-up, one first step
        assert interval == pytest.approx(60 * minutes, rel=0.05)
        said[minutes] = interval_finding(path)
    together = measured([tmp_path / "1", tmp_path / "7"])
    assert together.failures == 6
    assert together.node_s == together.run_s == pytest.approx(8 * 2 * 3600, rel=0.15)
    assert (together.durable_s, together.wait_s) == (10, 60)
    assert together.restart_s == pytest.approx(120)
    assert said[7] is None
    assert "the run saves every 60 s" in str(said[1])
    assert "so saving costs most" in str(said[1])
    assert "the run saves every 50 min" in str(said[50])
    assert "so lost work costs most" in str(said[50])
    assert "trainer.checkpoint.every_n_minutes: 7" in str(said[50]) or "every_n_minutes: 8" in str(said[50])
