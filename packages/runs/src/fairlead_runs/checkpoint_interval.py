"""How often to save: what an interval costs in saves and in lost work, and which one costs least.

Failures are taken to come independently of each other at a constant rate (Young 1974; Daly 2006, "A higher order
estimate of the optimum checkpoint interval for restart dumps").  All times are in seconds.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from fairlead.findings import Finding
from fairlead_runs.goodput import GOOD, VALIDATION, Goodput, StartTimes, event_time, goodput, timed_events

LEAST_FAILURES: Final = 2
"""Failures that a run must have had: of fewer nobody can tell how often they come."""
_WORTH: Final = 0.01
"""What another interval must give to be advised, as a share of the time."""


@dataclass(frozen=True)
class Costs:
    """What failures and saves cost a job.

    Attributes:
        save_s: Seconds for which the training waits while it saves.
        failure_s: Mean seconds between two failures of the whole job; of N nodes, that of one divided by N.
        restart_s: Seconds from a failure until the training goes on: noticing it, the queue, start-up, the first step.
    """

    save_s: float
    failure_s: float
    restart_s: float

    def best_interval(self) -> float:
        """Seconds of training between two saves that cost least, by Daly's estimate.

        Example:
            >>> round(Costs(save_s=10, failure_s=10_000, restart_s=300).best_interval())
            440
        """
        if self.save_s >= 2 * self.failure_s:
            return self.failure_s
        share = self.save_s / (2 * self.failure_s)
        return math.sqrt(2 * self.save_s * self.failure_s) * (1 + math.sqrt(share) / 3 + share / 9) - self.save_s

    def effective(self, interval: float) -> float:
        """The share of the time that is training which counts, with a save after each `interval` seconds of it."""
        if self.save_s + interval > 500 * self.failure_s:  # it never gets to a save
            return 0.0
        lost = math.exp(self.restart_s / self.failure_s) * math.expm1((interval + self.save_s) / self.failure_s)
        return interval / (self.failure_s * lost)

    def simulated(self, interval: float, days: float, trials: int = 200, seed: int = 0) -> Sequence[float]:
        """The same for trainings of so many days, each with failures of its own, the lowest first.

        Args:
            interval: Seconds of training between two saves.
            days: How long each takes on the clock.
            trials: How many are played.
            seed: Of the failures.
        """
        numbers = random.Random(seed)
        return sorted(self._played(interval, days * 86_400, numbers) for _ in range(trials))

    def _played(self, interval: float, length: float, numbers: random.Random) -> float:
        clock = kept = 0.0
        restarting = False
        while clock < length:
            ends = clock + numbers.expovariate(1 / self.failure_s)  # when the next failure comes
            begins = clock + (self.restart_s if restarting else 0.0)
            if begins < ends:  # else it fails again while it starts
                kept += interval * math.floor((min(ends, length) - begins) / (interval + self.save_s))
            clock, restarting = min(ends, length), True
        return kept / length


def measured_costs(run: Path, went: Goodput | None = None) -> tuple[Costs, float] | None:
    """The costs of a run, and the seconds of training between two of its saves; None: it has not failed often enough.

    A stop that was announced loses nothing, and is no failure.
    """
    went = went if went is not None else goodput(run)
    events = timed_events(run)
    orderly = {one.get("start") for one in events if one["event"] in ("signal", "finished")}
    failed = [one for one in went.starts[:-1] if one.number not in orderly and one.trained is not None]
    if len(failed) < LEAST_FAILURES:
        return None
    saves = [one for one in events if one["event"] == "checkpoint"]
    gaps = [
        event_time(later) - event_time(earlier)
        for earlier, later in pairwise(saves)
        if earlier.get("start") == later.get("start") and later.get("step") != earlier.get("step")
    ]
    trained = sum(_training(one) for one in went.starts)
    if not gaps or not trained:
        return None
    saving = sum(one.ranks[0].seconds.get("save", 0.0) for one in went.starts if one.ranks)
    save_s = max(saving / max(1, len(saves)), 0.001)
    restarts = [
        went.waits[position + 1] + later.seconds.get("start-up", 0.0) + later.seconds.get("first-step", 0.0)
        for position, (one, later) in enumerate(pairwise(went.starts))
        if one in failed and later.trained is not None
    ]
    if not restarts:
        return None
    ran = sum(one.ended - one.began for one in went.starts)
    return Costs(save_s, ran / len(failed), statistics.mean(restarts)), max(0.001, statistics.median(gaps) - save_s)


def _training(start: StartTimes) -> float:
    return sum(start.seconds.get(part, 0.0) for part in (*GOOD, VALIDATION))


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
        f"the run saves every {_words(interval)}, and {_words(best)} would cost less: "
        f"{then:.1%} of the time would count, in place of {now:.1%}",
        why=f"it has failed every {_words(costs.failure_s)}, a save takes {_words(costs.save_s)} of the training, and "
        f"{_words(costs.restart_s)} pass until it goes on; so {'lost work' if seldom else 'saving'} costs most",
        fix=f"trainer.checkpoint.every_n_minutes: {max(1, round(best / 60))}"
        if best >= 45
        else "save after fewer steps (trainer.checkpoint.every_n_steps)",
    )


def _words(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
