"""What a monitoring system gets of a run: the names of its metrics, and their values from the run directory."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from fairlead_runs.goodput import goodput
from fairlead_runs.heartbeat import Beat, read_heartbeats
from fairlead_runs.history import read_history
from fairlead_runs.pace import speed
from fairlead_runs.step_times import read_times

_SUFFIXES: Final = {
    "s": "_seconds",
    "By": "_bytes",
    "1": "_ratio",
    "{step}/s": "_per_second",
    "{sample}/s": "_per_second",
}
PROMETHEUS_TARGETS: Final = "prometheus-targets.json"
"""Where a run that trains answers Prometheus, in the form of its `file_sd_configs`."""
_TIMES_S: Final = 5.0
_NOT_IN_NAMES: Final = re.compile(r"[^a-zA-Z0-9_]+")


@dataclass(frozen=True)
class Metric:
    """A metric by OpenTelemetry's conventions.

    Attributes:
        name: With dots, as `fairlead.run.steps`.
        unit: In UCUM, as `s`, `By`; `{step}` of what is counted.
        kind: A counter never falls while a start runs.
        text: What it is.
    """

    name: str
    unit: str
    kind: Literal["counter", "gauge"]
    text: str

    @property
    def prometheus(self) -> str:
        """Its name in Prometheus, by OpenTelemetry's rules for the translation.

        Example:
            >>> RUN_STEPS.prometheus, MEMORY.prometheus
            ('fairlead_run_steps_total', 'fairlead_run_memory_usage_bytes')
        """
        plain = self.name.replace(".", "_") + _SUFFIXES.get(self.unit, "")
        return f"{plain}_total" if self.kind == "counter" else plain


ACTIVE: Final = Metric("fairlead.run.active", "", "gauge", "1 while the run trains, 0 when this start has ended")
STEP: Final = Metric("fairlead.run.step", "{step}", "gauge", "Optimizer steps that are done; a resume may go back")
EPOCH: Final = Metric("fairlead.run.epoch", "{epoch}", "gauge", "The epoch, from 0")
RUN_STEPS: Final = Metric("fairlead.run.steps", "{step}", "counter", "Optimizer steps of this start; each begins at 0")
SAMPLES: Final = Metric(
    "fairlead.run.samples", "{sample}", "counter", "Samples of this start, over all ranks; each begins at 0"
)
STEP_RATE: Final = Metric(
    "fairlead.run.throughput.steps", "{step}/s", "gauge", "Steps a second, with all that lies between two steps"
)
SAMPLE_RATE: Final = Metric(
    "fairlead.run.throughput.samples", "{sample}/s", "gauge", "Samples a second over all ranks, likewise"
)
STEP_SHARE: Final = Metric(
    "fairlead.step.share", "1", "gauge", "Share of a step by part, the mean of all ranks: data (the wait for it), ..."
)
GOODPUT: Final = Metric(
    "fairlead.run.goodput", "1", "gauge", "Share of the time since the first start in steps that were kept"
)
MEMORY: Final = Metric("fairlead.run.memory.usage", "By", "gauge", "Memory of rank 0, by device: host, or cuda:0")
MEMORY_PEAK: Final = Metric("fairlead.run.memory.peak", "By", "gauge", "The most memory that rank 0 has used")
SAVES: Final = Metric("fairlead.run.saves", "{save}", "counter", "Checkpoints, by outcome: saved, or failed")
SAVE_TIME: Final = Metric("fairlead.run.save.time", "s", "counter", "Time from the start of each save until complete")
SAVE_STEP: Final = Metric("fairlead.run.save.step", "{step}", "gauge", "The step of the newest complete checkpoint")
RESTARTS: Final = Metric("fairlead.run.restarts", "{start}", "counter", "Starts after the first")
RANKS: Final = Metric("fairlead.rank.seen", "{rank}", "gauge", "Ranks that have given a sign of life in this start")
LAG: Final = Metric("fairlead.rank.lag", "{step}", "gauge", "Steps that the last rank is behind the first")
HEARTBEAT: Final = Metric(
    "fairlead.rank.heartbeat", "s", "gauge", "Unix time at which the most silent rank gave a sign"
)
METRICS: Final = (
    *(ACTIVE, STEP, EPOCH, RUN_STEPS, SAMPLES, STEP_RATE, SAMPLE_RATE, STEP_SHARE, GOODPUT, MEMORY),
    *(MEMORY_PEAK, SAVES, SAVE_TIME, SAVE_STEP, RESTARTS, RANKS, LAG, HEARTBEAT),
)
"""Those that every run has, besides what it logs."""


def logged_metric(name: str) -> Metric:
    """The metric of a value that the run logs; its label `metric` has the name as it is.

    Example:
        >>> logged_metric("train/loss").name
        'fairlead.logged.train_loss'
    """
    plain = _NOT_IN_NAMES.sub("_", name).strip("_")
    return Metric(f"fairlead.logged.{plain}", "", "gauge", "A value that the run logs")


def scraped_at(run: Path) -> str | None:
    """The address at which a run's metrics are scraped, `http://n1:9464/metrics`; None: at none."""
    try:
        [targets] = json.loads((run / PROMETHEUS_TARGETS).read_text(encoding="utf-8"))
        return f"http://{targets['targets'][0]}/metrics"
    except (OSError, ValueError, LookupError, TypeError):
        return None  # it is there while the run trains


@dataclass(frozen=True)
class Reading:
    """The value of a metric now, with its labels."""

    metric: Metric
    value: float
    labels: Mapping[str, str]


class RunMetrics:
    """Reads the metrics of a run that trains; any thread of rank 0 may ask."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir
        self._lock = threading.Lock()
        self._size = -1
        self._events: list[dict[str, Any]] = []
        self._shares: list[Reading] = []
        self._times_due = float("-inf")
        self._logged: dict[str, float] = {}

    def log(self, values: Mapping[str, Any]) -> None:
        """Takes what is logged: numbers, or tensors with one element; the rest is left out."""
        for name, value in values.items():
            value = value.item() if getattr(value, "ndim", None) == 0 else value
            if isinstance(value, int | float) and name != "step":
                self._logged[name] = float(value)

    def read(self, run: str, *, active: bool = True) -> list[Reading]:
        """All that is known, each with the label `run`; `active`: the training runs."""
        with self._lock:
            self._refresh()
            found = [*self._readings(active), *_memory()]
        return [Reading(one.metric, one.value, {"run": run, **one.labels}) for one in found]

    def _readings(self, active: bool) -> Iterator[Reading]:
        yield Reading(ACTIVE, float(active), {})
        events, start = self._events, max((int(one.get("start", 0)) for one in self._events), default=0)
        beats = [beat for beat in read_heartbeats(self._path / "heartbeats") if beat.start == start]
        here = {one["event"]: one for one in events if one.get("start") == start}
        saved = [one for one in events if one["event"] == "checkpoint"]
        failed = sum(one["event"] == "checkpoint-failed" for one in events)
        yield Reading(RESTARTS, max(0, sum(one["event"] == "start" for one in events) - 1), {})
        yield Reading(SAVES, len(saved), {"outcome": "saved"})
        yield Reading(SAVES, failed, {"outcome": "failed"})
        yield Reading(SAVE_TIME, sum(float(one.get("seconds", 0)) for one in saved), {})
        if saved:
            yield Reading(SAVE_STEP, int(saved[-1]["step"]), {})
        if "training" in here:
            yield from self._training(events, beats, here, start)
        if beats:
            yield Reading(RANKS, len(beats), {})
            yield Reading(HEARTBEAT, min(beat.time for beat in beats), {})
        for name, value in list(self._logged.items()):
            if name != "epoch":
                yield Reading(logged_metric(name), value, {"metric": name})

    def _training(
        self, events: list[dict[str, Any]], beats: list[Beat], here: Mapping[str, Mapping[str, Any]], start: int
    ) -> Iterator[Reading]:
        first = int(here["training"]["step"])
        steps = [max(first, beat.step) for beat in beats]
        step, batch = max(steps, default=first), here.get("batch", {}).get("samples")
        yield Reading(STEP, step, {})
        yield Reading(EPOCH, self._logged.get("epoch", float(here["training"].get("epoch", 0))), {})
        yield Reading(RUN_STEPS, step - first, {})
        rate = speed(events, beats)
        if rate is not None:
            yield Reading(STEP_RATE, rate, {})
        if batch is not None:
            yield Reading(SAMPLES, (step - first) * batch, {})
            if rate is not None:
                yield Reading(SAMPLE_RATE, rate * batch, {})
        if steps:
            yield Reading(LAG, step - min(steps), {})
        yield from self._times(start)

    def _times(self, start: int) -> list[Reading]:
        """What the ranks have measured of their steps; they write it every ten seconds."""
        if time.monotonic() < self._times_due:
            return self._shares
        self._times_due = time.monotonic() + _TIMES_S
        ranks = [shares for one in read_times(self._path, start) if (shares := one.shares)]
        parts = dict.fromkeys(part for shares in ranks for part in shares)
        means = {part: sum(shares.get(part, 0.0) for shares in ranks) / len(ranks) for part in parts}
        self._shares = [Reading(STEP_SHARE, value, {"part": part}) for part, value in means.items()]
        share = goodput(self._path).share
        if share is not None:
            self._shares.append(Reading(GOODPUT, share, {}))
        return self._shares

    def _refresh(self) -> None:
        """Reads the history if it has grown."""
        file = self._path / "history.jsonl"
        size = file.stat().st_size if file.exists() else 0
        if size != self._size:
            self._size, self._events = size, read_history(file)


def _memory() -> Iterator[Reading]:
    """What this process uses, and its devices if they are CUDA's."""
    status, kib = Path("/proc/self/status"), {"VmRSS": MEMORY, "VmHWM": MEMORY_PEAK}
    for line in status.read_text().splitlines() if status.exists() else ():
        key, _, value = line.partition(":")
        if key in kib:
            yield Reading(kib[key], int(value.split()[0]) * 1024, {"device": "host"})
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        for number in range(cuda.device_count()):
            if cuda.max_memory_allocated(number):
                yield Reading(MEMORY, cuda.memory_allocated(number), {"device": f"cuda:{number}"})
                yield Reading(MEMORY_PEAK, cuda.max_memory_allocated(number), {"device": f"cuda:{number}"})
