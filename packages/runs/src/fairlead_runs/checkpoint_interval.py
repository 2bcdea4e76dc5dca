"""How often to save: what an interval costs in saves and in lost work, and which one costs least.

Failures are taken to come independently of each other at a constant rate (Young 1974; Daly 2006, "A higher order
estimate of the optimum checkpoint interval for restart dumps").  All times are in seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from fairlead.findings import Finding
from fairlead_runs.describe import duration
from fairlead_runs.goodput import Goodput, event_time, goodput, timed_events

LEAST_FAILURES: Final = 2
"""Failures that a run must have had: fewer do not show how often they occur."""
_WORTH: Final = 0.01
"""What another interval must give to be advised, as a share of the time."""


@dataclass(frozen=True)
class Costs:
    """What failures and saves cost a job.

    Attributes:
        save_s: Seconds for which the training waits while it saves.
        failure_s: Mean seconds between two failures of the whole job; of N nodes, that of one divided by N.
        restart_s: Seconds from a failure until the training continues: noticing it, queue, start-up, the first step.
        durable_s: Seconds from the beginning of a save until its checkpoint is durable, where that is longer than the
            training waits: a failure in between is followed by the checkpoint before.
    """

    save_s: float
    failure_s: float
    restart_s: float
    durable_s: float = 0.0

    def best_interval(self) -> float:
        """Seconds of training between two saves that cost least, by Daly's estimate.

        Example:
            >>> round(Costs(save_s=10, failure_s=10_000, restart_s=300).best_interval())
            441
        """
        if self.save_s >= 2 * self.failure_s:
            return self.failure_s
        share = self.save_s / (2 * self.failure_s)
        return math.sqrt(2 * self.save_s * self.failure_s) * (1 + math.sqrt(share) / 3 + share / 9) - self.save_s

    def effective(self, interval: float) -> float:
        """The share of the time that is training which counts, with a save after each `interval` seconds of it."""
        if self.save_s + interval > 500 * self.failure_s:  # it never gets to a save
            return 0.0
        downtime_s = self.restart_s + max(0.0, self.durable_s - self.save_s)
        lost = math.exp(downtime_s / self.failure_s) * math.expm1((interval + self.save_s) / self.failure_s)
        return interval / (self.failure_s * lost)


@dataclass(frozen=True)
class Measured:
    """What a run's history, or those of several runs together, say of failures, saves and starts.

    Attributes:
        failures: How often a start ended by something else than an announced stop or the end of the run.
        run_s: Seconds for which its starts ran; `node_s`: times the nodes of each.
        save_s: Seconds of a save for which the training waited; None: nothing was saved.
        durable_s: Seconds from the beginning of a save until its checkpoint was durable; None likewise.
        interval_s: Seconds of training between two saves; None: there were not two in one start.
        restart_s: Seconds from the begin of a start to the end of its first step; None: none has trained.
        wait_s: Seconds between the end of a start that failed and the next one; None: there was none.
    """

    failures: int
    run_s: float
    node_s: float
    save_s: float | None
    durable_s: float | None
    interval_s: float | None
    restart_s: float | None
    wait_s: float | None


def measured(runs: Sequence[Path]) -> Measured:
    """What the histories of these runs say together.

    A stop that was announced loses nothing, and is no failure; nor is the last start of a run one, which may still run.
    """
    return _measured([(goodput(run), timed_events(run)) for run in runs])


def _measured(histories: Sequence[tuple[Goodput, Sequence[Mapping[str, Any]]]]) -> Measured:
    run_s = node_s = saving = 0.0
    failures = saved = 0
    gaps, durable, restarts, waits = [], [], [], []
    for went, events in histories:
        orderly = {one.get("start") for one in events if one["event"] in ("signal", "stop", "finished")}
        failed = {one.number for one in went.starts[:-1] if one.number not in orderly and one.trained is not None}
        failures += len(failed)
        saves = [one for one in events if one["event"] == "checkpoint"]
        durable += [float(one["seconds"]) for one in saves if isinstance(one.get("seconds"), int | float)]
        gaps += [
            event_time(later) - event_time(earlier)
            for earlier, later in pairwise(saves)
            if earlier.get("start") == later.get("start") and later.get("step") != earlier.get("step")
        ]
        saved += len(saves)
        saving += sum(one.ranks[0].seconds.get("save", 0.0) for one in went.starts if one.ranks)
        waits += [wait for one, wait in zip(went.starts, went.waits[1:], strict=False) if one.number in failed]
        for one in went.starts:
            run_s += one.ended - one.began
            node_s += (one.ended - one.began) * max(1, len({rank.host for rank in one.ranks}))
            if one.trained is not None:
                restarts.append(one.seconds.get("start-up", 0.0) + one.seconds.get("first-step", 0.0))
    save_s = max(0.001, saving / saved) if saved else None
    return Measured(
        failures=failures,
        run_s=run_s,
        node_s=node_s,
        save_s=save_s,
        durable_s=statistics.mean(durable) if durable else None,
        interval_s=max(0.001, statistics.median(gaps) - (save_s or 0.0)) if gaps else None,
        restart_s=statistics.mean(restarts) if restarts else None,
        wait_s=statistics.mean(waits) if waits else None,
    )


def measured_costs(run: Path, went: Goodput | None = None) -> tuple[Costs, float] | None:
    """The costs of a run, and the seconds of training between two of its saves; None: it has failed too seldom."""
    found = _measured([(went if went is not None else goodput(run), timed_events(run))])
    if found.failures < LEAST_FAILURES:
        return None
    if found.interval_s is None or found.save_s is None or found.restart_s is None:
        return None
    restart_s = found.restart_s + (found.wait_s or 0.0)
    costs = Costs(found.save_s, found.run_s / found.failures, restart_s, found.durable_s or 0.0)
    return costs, found.interval_s


def interval_finding(run: Path, went: Goodput | None = None) -> Finding | None:
    """That a run saves far too seldom or too often for its failures; None: it does not, or that is not known."""
    measured = measured_costs(run, went)
    if measured is None:
        return None
    costs, interval = measured
    best = costs.best_interval()
    now, then = costs.effective(interval), costs.effective(best)
    if then - now < _WORTH:
        return None
    seldom = best < interval
    return Finding(
        "warning",
        "checkpoint-interval",
        f"the run saves every {duration(interval)}, and {duration(best)} would cost less: "
        f"{then:.1%} of the time would count, instead of {now:.1%}",
        why=f"it has failed every {duration(costs.failure_s)}, a save takes {duration(costs.save_s)} of the training, "
        f"and {duration(costs.restart_s)} pass until it continues; so {'lost work' if seldom else 'saving'} costs most",
        fix=f"trainer.checkpoint.every_n_minutes: {max(1, round(best / 60))}"
        if best >= 45
        else "save after fewer steps (trainer.checkpoint.every_n_steps)",
    )
