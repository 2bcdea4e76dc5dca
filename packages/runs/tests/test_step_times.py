"""Where the time of a rank goes, and what is said of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from fairlead_runs.goodput import LOST, OTHER, QUEUE, SAVING, START_UP, goodput
from fairlead_runs.history import History
from fairlead_runs.step_findings import step_findings
from fairlead_runs.step_times import (
    FIRST_STEP,
    RECORD_BYTES,
    Period,
    RankTimes,
    StepTimes,
    read_series,
    read_times,
    times_folder,
)


class Clock:
    """A clock that the test moves."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def step_times(run: Path, clock: Clock, *, rank: int = 0, start: int = 1, interval_s: float = 10.0) -> StepTimes:
    folder = times_folder(run, start)
    return StepTimes(
        folder, node=0, local_rank=rank, rank=rank, host=f"n{rank}", interval_s=interval_s, clock=clock, now=clock
    )


def one_step(times: StepTimes, clock: Clock, step: int, data: float = 1.0, wait: float = 0.0) -> None:
    times.at("data")
    clock.now += data
    times.at("forward")
    clock.now += 2.0
    times.at("backward")
    clock.now += 3.0 + wait
    times.at("optimizer")
    clock.now += 1.0
    times.at("logging")
    times.beat("train", step)


def test_every_second_is_booked_and_a_starts_first_step_is_apart(tmp_path: Path) -> None:
    clock = Clock(100.0)
    times = step_times(tmp_path, clock)
    times.beat("setup", 0)
    clock.now += 5.0
    times.beat("first-batch", 40)  # resumed there
    for step in (41, 42, 43):
        one_step(times, clock, step, data=9.0 if step == 41 else 1.0)
    times.beat("validate", 43)
    clock.now += 11.0
    times.beat("train", 43)
    times.close()
    (found,) = read_times(tmp_path, 1)
    assert found.seconds == {
        "setup": 5.0,
        FIRST_STEP: 15.0,
        "data": 2.0,
        "forward": 4.0,
        "backward": 6.0,
        "optimizer": 2.0,
        "validate": 11.0,
    }
    assert sum(found.seconds.values()) == clock.now - 100.0
    assert (found.step, found.steps, found.mean_s, found.max_s) == (43, 2, 7.0, 7.0)
    assert found.shares == {"data": 1 / 7, "forward": 2 / 7, "backward": 3 / 7, "optimizer": 1 / 7}


def test_the_periods_of_rank_0_add_up_to_what_it_has_measured(tmp_path: Path) -> None:
    clock = Clock(0.0)
    times = step_times(tmp_path, clock)
    times.beat("setup", 0)
    for step in range(1, 31):
        one_step(times, clock, step)
    times.close()
    periods = read_series(tmp_path, 1)
    (found,) = read_times(tmp_path, 1)
    assert len(periods) > 5
    assert sum(one.steps for one in periods) == found.steps == 29
    for part, seconds in found.seconds.items():
        assert sum(one.seconds.get(part, 0.0) for one in periods) == pytest.approx(seconds), part
    assert periods[-1].step_s == 7.0


def test_a_long_start_has_a_short_series(tmp_path: Path) -> None:
    clock = Clock(0.0)
    times = step_times(tmp_path, clock)
    for step in range(1, 20_000):
        one_step(times, clock, step)
    times.close()
    assert 500 < len(read_series(tmp_path, 1)) < 3000


def test_torn_records_and_lines_are_left_out(tmp_path: Path) -> None:
    clock = Clock(0.0)
    for rank in range(3):
        times = step_times(tmp_path, clock, rank=rank)
        one_step(times, clock, 1)
        times.close()
    file = times_folder(tmp_path, 1) / "node-00000.txt"
    data = bytearray(file.read_bytes())
    data[RECORD_BYTES + 20] ^= 1
    file.write_bytes(data)
    with (times_folder(tmp_path, 1) / "series.jsonl").open("a") as series:
        series.write("[12.5, 3")
    assert [one.rank for one in read_times(tmp_path, 1)] == [0, 2]
    assert all(isinstance(one, Period) for one in read_series(tmp_path, 1))
    assert read_times(tmp_path, 7) == []
    assert read_series(tmp_path, 7) == []


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "times").write_text("a file is in the way")
    clock = Clock(0.0)
    times = step_times(tmp_path, clock)
    for step in range(1, 9):
        one_step(times, clock, step)
    times.close()
    assert isinstance(times.error, OSError)


def test_a_loop_with_dozens_of_phases_keeps_its_record_whole(tmp_path: Path) -> None:
    clock = Clock(0.0)
    times = step_times(tmp_path, clock)
    for number in range(200):
        times.beat(f"a-phase-with-a-rather-long-name-{number}", 0)
        clock.now += 1.0
    times.close()
    (found,) = read_times(tmp_path, 1)
    assert sum(found.seconds.values()) == 200.0


def test_a_rank_that_stands_still_is_recorded_by_another_thread(tmp_path: Path) -> None:
    clock = Clock(0.0)
    times = step_times(tmp_path, clock)
    times.beat("setup", 0)
    for step in (1, 2):
        one_step(times, clock, step, data=0.1)
    times.at("forward")
    clock.now += 300.0
    times.write_still()
    (found,) = read_times(tmp_path, 1)
    assert found.seconds["forward"] == 302.0
    assert (found.step, found.time) == (2, clock.now)
    one_step(times, clock, 3)  # it wakes: nothing is counted twice
    times.close()
    (found,) = read_times(tmp_path, 1)
    assert sum(found.seconds.values()) == pytest.approx(clock.now)


# -- findings


def rank_times(rank: int = 0, *, comm_s: float = 0.0, comm_bytes: float = 0.0, **seconds: float) -> RankTimes:
    steps = 100
    mean = sum(seconds.values())
    facts = {"workers": 3.0, "pinned": 0.0, "comm_s": comm_s, "comm_bytes": comm_bytes}
    spent = {part: value * steps for part, value in seconds.items()}
    recent = Period(0.0, steps, 0, {})
    return RankTimes(rank, rank // 2, f"n{rank // 2}", 1, 0.0, steps, steps, spent, mean, 0.0, mean, recent, facts)


def test_a_loader_that_is_waited_for_is_named_with_its_settings() -> None:
    (found,) = step_findings([rank_times(data=0.062, forward=0.018, backward=0.02)])
    assert found.code == "data-wait"
    assert found.what == "the loader takes 62% of a step: 62 ms of 100 ms"
    assert "3 workers a rank, pinned memory off" in str(found.why)
    assert "38 ms" in str(found.why)
    assert "num_workers=6" in str(found.fix)


def test_what_less_communication_would_give_is_computed() -> None:
    ranks = [
        rank_times(rank, comm_s=0.058, comm_bytes=2.4e9, forward=0.02, backward=0.07, optimizer=0.01)
        for rank in range(4)
    ]
    (found,) = step_findings(ranks)
    assert found.code == "communication-wait"
    assert found.what.startswith("58% of a step waits for the gradients of 2.4 GB to be averaged")
    assert "4 ranks on 2 nodes" in str(found.why)
    assert "1.41 times" in str(found.fix)  # 1 / (1 - 0.29)
    assert "1.77 times" in str(found.fix)  # 1 / (1 - 0.435)


def test_a_slow_rank_is_told_from_those_that_wait_for_it() -> None:
    fast = [rank_times(rank, comm_s=0.04, forward=0.03, backward=0.07) for rank in (0, 1, 3)]
    slow = rank_times(2, forward=0.07, backward=0.03)
    codes = {one.code: one for one in step_findings([*fast, slow])}
    assert "rank 2 (n1): 100 ms" in codes["slow-rank"].what
    assert "most of rank 2's time is forward" in str(codes["slow-rank"].why)


def test_a_healthy_run_and_one_that_has_just_begun_have_no_findings() -> None:
    assert list(step_findings([rank_times(data=0.005, forward=0.05, backward=0.05)])) == []
    assert list(step_findings([])) == []


# -- goodput


def event(run: Path, clock: Clock, name: str, start: int, **fields: object) -> None:
    history = History(run / "history.jsonl", start=start)
    history.append(name, durable=False, **fields)
    lines = (run / "history.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    last["time"] = f"2026-01-01T{int(clock.now) // 3600:02}:{int(clock.now) // 60 % 60:02}:{clock.now % 60:06.3f}+00:00"
    (run / "history.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")


def test_the_parts_of_a_run_with_a_failure_are_all_of_its_time(tmp_path: Path) -> None:
    epoch = 1767225600.0  # 2026-01-01
    clock = Clock(0.0)

    class Now(Clock):
        def __call__(self) -> float:
            return epoch + clock.now

    def start(number: int, steps: range, save_at: int | None) -> None:
        event(tmp_path, clock, "start", number, world_size=2)
        clock.now += 20.0
        event(tmp_path, clock, "training", number, step=steps[0] - 1, epoch=0)
        times = StepTimes(
            times_folder(tmp_path, number), node=0, local_rank=0, rank=0, host="n", clock=clock, now=Now()
        )
        times.beat("first-batch", steps[0] - 1)
        for step in steps:
            one_step(times, clock, step)
            if step == save_at:
                times.beat("save", step)
                clock.now += 4.0
                times.beat("train", step)
                event(tmp_path, clock, "checkpoint", number, step=step)
        times.close()

    start(1, range(1, 31), save_at=20)
    clock.now += 30.0  # nothing moves, until it is noticed
    event(tmp_path, clock, "failed", 1, step=30, error="rank 1 died")
    clock.now += 50.0  # the scheduler starts it again
    start(2, range(21, 41), save_at=40)
    event(tmp_path, clock, "finished", 2, step=40)

    went = goodput(tmp_path)
    assert went.total_s == pytest.approx(clock.now)
    assert went.seconds[QUEUE] == pytest.approx(50.0)
    assert went.seconds[START_UP] == pytest.approx(40.0)
    assert went.seconds[FIRST_STEP] == pytest.approx(14.0)
    first, second = went.starts
    assert (first.last_step, first.continued_step, second.first_step) == (30, 20, 20)
    # 10 of 30 steps and their share of the save are done again, and 30 s passed until the failure was noticed.
    assert went.seconds[LOST] == pytest.approx(29 * 7.0 / 3 + 4.0 / 3 + 30.0, rel=0.02)
    assert went.seconds[SAVING] == pytest.approx(4.0 * 2 / 3 + 4.0)
    assert went.seconds.get(OTHER, 0.0) < 1.0
    good = 29 * 7.0 * 2 / 3 + 19 * 7.0
    assert went.share == pytest.approx(good / went.total_s, rel=0.01)


def test_many_starts_that_never_trained_are_counted(tmp_path: Path) -> None:
    at = [f"2026-01-01T00:{one // 60:02}:{one % 60:02}+00:00" for one in range(800)]
    lines: list[dict[str, Any]] = [{"event": "start", "start": one, "time": when} for one, when in enumerate(at)]
    lines += [dict(lines[0], event="training", step=0), dict(lines[-1], event="training", step=7)]
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    went = goodput(tmp_path)
    assert len(went.starts) == 800


def test_a_first_step_that_never_ended_is_no_training(tmp_path: Path) -> None:
    clock = Clock(1767225600.0)
    event(tmp_path, Clock(0.0), "start", 1, world_size=1)
    event(tmp_path, Clock(1.0), "training", 1, step=0, epoch=0)
    times = step_times(tmp_path, clock)
    times.beat("first-batch", 0)
    times.at("forward")
    clock.now += 5.0
    times.beat("failed", 0)
    times.close()
    went = goodput(tmp_path)
    assert went.share is None
    assert went.seconds[FIRST_STEP] == pytest.approx(5.0)


def test_an_event_without_a_time_is_left_out(tmp_path: Path) -> None:
    """A start reads this before it trains: a damaged line must not end it."""
    event(tmp_path, Clock(0.0), "start", 1, world_size=1)
    with (tmp_path / "history.jsonl").open("a") as history:
        history.write('{"event": "checkpoint", "start": 1}\n{"event": "stop", "time": "soon", "start": 1}\n')
    event(tmp_path, Clock(9.0), "failed", 1, step=0)
    assert goodput(tmp_path).total_s == pytest.approx(9.0)


def test_a_run_that_was_never_started_has_no_goodput(tmp_path: Path) -> None:
    went = goodput(tmp_path)
    assert (went.share, went.total_s, list(itertools.chain(went.starts))) == (None, 0, [])
