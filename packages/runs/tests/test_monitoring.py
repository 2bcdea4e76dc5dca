"""What a monitoring system is told of a run: values from its directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairlead_runs import Heartbeat, History
from fairlead_runs.heartbeat import heartbeat_path
from fairlead_runs.monitoring import METRICS, Metric, Reading, RunMetrics, logged_metric
from fairlead_runs.step_times import StepTimes, times_folder


def values(found: list[Reading]) -> dict[str, float]:
    assert {one.labels["run"] for one in found} == {"run"}
    labels = {id(one): "".join(f"{{{v}}}" for k, v in one.labels.items() if k != "run") for one in found}
    return {one.metric.prometheus + labels[id(one)]: one.value for one in found}


class Start:
    """A start of a run of two ranks, as its directory shows it."""

    def __init__(self, run: Path, number: int, step: int) -> None:
        self.history = History(run / "history.jsonl", start=number)
        self.history.append("start")
        self.history.append("training", step=step, epoch=1)
        self.history.append("batch", samples=8)
        self.now = 0.0
        self.times = [
            StepTimes(times_folder(run, number), node=0, local_rank=n, rank=n, clock=self.clock) for n in (0, 1)
        ]
        self.beats = [Heartbeat(heartbeat_path(run / "heartbeats", 0), n, n, start=number) for n in (0, 1)]

    def at(self, *steps: int) -> None:
        for beat, step in zip(self.beats, steps, strict=True):
            beat._due = 0.0
            beat.beat("train", step)

    def clock(self) -> float:
        return self.now

    def work(self, data: float, compute: float) -> None:
        """Two steps of the first rank; the second waits for data twice as long."""
        for rank, times in enumerate(self.times):
            for step in range(1, 4):  # the first one is apart
                times.at("data")
                self.now += data * (1 + rank)
                times.at("compute")
                self.now += compute
                times.beat("train", step)
            times.write()

    def close(self) -> None:
        for beat in self.beats:
            beat.close()


def test_what_is_told_of_a_run_and_of_a_start_that_resumes(tmp_path: Path) -> None:
    first = Start(tmp_path, 1, 0)
    metrics = RunMetrics(tmp_path)
    metrics.log({"train/loss": 0.5, "epoch": 1, "note": "text"})
    first.at(10, 9)
    first.history.append("checkpoint", step=6, seconds=1.5)
    first.history.append("checkpoint-failed", step=9)
    found = values(metrics.read("run"))
    assert found == found | {
        "fairlead_run_step": 10,
        "fairlead_run_steps_total": 10,
        "fairlead_run_samples_total": 80,
        "fairlead_run_saves_total{saved}": 1,
        "fairlead_run_saves_total{failed}": 1,
        "fairlead_run_save_time_seconds_total": 1.5,
        "fairlead_run_save_step": 6,
        "fairlead_run_restarts_total": 0,
        "fairlead_rank_seen": 2,
        "fairlead_rank_lag": 1,
        "fairlead_logged_train_loss{train/loss}": 0.5,
        "fairlead_run_epoch": 1,
    }
    first.close()

    second = Start(tmp_path, 2, 6)  # nothing was said of the first's end: it was killed
    metrics = RunMetrics(tmp_path)
    begun = values(metrics.read("run"))
    assert (begun["fairlead_run_step"], begun["fairlead_run_steps_total"]) == (6, 0)
    second.at(9, 9)
    found = values(metrics.read("run"))
    assert (found["fairlead_run_step"], found["fairlead_run_steps_total"]) == (9, 3)
    assert found["fairlead_run_samples_total"] == 8 * 3
    assert found["fairlead_run_restarts_total"] == 1
    second.close()


def test_shares_of_a_step_are_the_means_of_the_ranks(tmp_path: Path) -> None:
    start = Start(tmp_path, 1, 0)
    start.work(data=1.0, compute=1.0)
    found = values(RunMetrics(tmp_path).read("run"))
    assert found["fairlead_step_share_ratio{data}"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert found["fairlead_step_share_ratio{compute}"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert found["fairlead_run_goodput_ratio"] > 0
    start.close()


def test_a_run_that_has_not_begun_has_no_steps_yet(tmp_path: Path) -> None:
    found = values(RunMetrics(tmp_path).read("run"))
    assert found["fairlead_run_active"] == 1
    assert "fairlead_run_steps_total" not in found


def test_names_follow_opentelemetry() -> None:
    """Lower case, dots and underscores; a counter is in the plural or has a unit of its own; no name is a namespace."""
    names = [metric.name for metric in METRICS]
    assert all(name == name.lower() and name.startswith("fairlead.") for name in names)
    assert not [one for one in names for other in names if other.startswith(f"{one}.")]
    assert Metric("a.b", "{step}/s", "gauge", "").prometheus == "a_b_per_second"
    assert logged_metric("val/acc@5 top").prometheus == "fairlead_logged_val_acc_5_top"
