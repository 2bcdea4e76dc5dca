"""What failures will cost a job: time that counts, the interval between saves, and what would shorten it.

Failures come independently of each other at a constant rate per node. Torch-free; all times are in seconds.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from fairlead.errors import ConfigError
from fairlead_runs.checkpoint_interval import LEAST_FAILURES, Costs, Measured
from fairlead_runs.describe import counted, duration

DAY_S: Final = 86_400.0
_MOST_FAILURES: Final = 60_000
"""So many are played in all, of 40 to 200 jobs."""
_HOPELESS: Final = 0.02
"""Of a job that is less effective nothing is played: it does not end."""
_FACTORS: Final = (0.5, 0.7, 1.0, 1.4, 2.0)
"""Times Daly's interval: those among which the simulation chooses."""


@dataclass(frozen=True)
class Figure:
    """A number, and where it is from."""

    value: float
    source: str


ASSUMED: Final[Mapping[str, Figure]] = {
    "failures": Figure(
        419 / 54 / 2048 * 1000,
        "Llama 3: 419 in 54 days on 2,048 nodes, arXiv:2407.21783; Meta's research clusters: 2.34 and 6.50, "
        "arXiv:2410.21680",
    ),
    "restart_s": Figure(600, "MegaScale: found and diagnosed within 10 minutes on average, arXiv:2402.15627"),
    "save_s": Figure(30, "assumed, without a source"),
    "queue_s": Figure(1800, "assumed, without a source"),
    "repair_s": Figure(DAY_S, "assumed, without a source"),
    "node_share": Figure(0.78, "Llama 3: the share of confirmed or suspected hardware"),
    "node_gb_s": Figure(1.0, "Llama 3: storage of 2 TB/s, sustained, for about 2,000 nodes"),
}
"""What is taken where nothing is given and no history says it; failures are those of 1,000 nodes a day."""


@dataclass(frozen=True)
class Situation:
    """What a forecast is made of.

    Attributes:
        nodes: Those that work.
        spares: Nodes of the allocation that wait until one is needed.
        failures: Of the job, per 1,000 nodes and day, as far as they interrupt it.
        observed: How many failures the rate was formed from; None: it is given. The fewer, the wider the spread.
        save_s: Seconds that training waits for a save.
        durable_s: Seconds until its checkpoint is durable.
        restart_s: Seconds from a failure to the end of the next start's first step, without the wait for a node.
        queue_s: Seconds until the next start begins, when a node is lost and there is no spare.
        repair_s: Seconds after which a lost node is a spare.
        node_share: The share of failures after which the node cannot be used.
    """

    nodes: int
    spares: int
    failures: Figure
    observed: int | None
    save_s: Figure
    durable_s: Figure
    restart_s: Figure
    queue_s: Figure
    repair_s: Figure
    node_share: Figure

    @property
    def failure_s(self) -> float:
        """Mean seconds between two failures of the job."""
        rate = self.failures.value * self.nodes / 1000 / DAY_S
        return 1 / rate if rate else math.inf

    @property
    def costs(self) -> Costs:
        """As the formula takes them: without spares every lost node costs the queue, with them none does."""
        waits = 0.0 if self.spares else self.node_share.value * self.queue_s.value
        return Costs(max(self.save_s.value, 1e-3), self.failure_s, self.restart_s.value + waits, self.durable_s.value)


@dataclass(frozen=True)
class Worth:
    """What a change would save, in hours of the job on the clock, each time with the interval that is best then."""

    change: str
    hours: float


@dataclass(frozen=True)
class GoodputForecast:
    """What failures will cost a job.

    Attributes:
        days: Of training, if nothing ever failed and nothing was saved.
        interval_s: Seconds of training between two saves that the rest is computed for: the job's own, else the best.
        daly_s: Those that are best by Daly's formula; infinite without failures.
        simulated_s: Those that are best of 0.5 to 2 times as many in the simulation.
        formula: The share of the time that counts by the formula; `effective`: by the simulation, its mean, and of 90 %
            of the jobs the `lowest` and `highest`.
        ends_after: Days on the clock until the job's end: mean, and the 5th and 95th of 100 jobs; infinite: never.
        interruptions: How many, likewise.
        lost_h: Hours of training that are done twice; `saves_h`, `restarts_h`, `queue_h`: of the other losses.
        best_saves_h: Hours that the job would end earlier with the best interval; 0: it has that.
        worth: What would shorten the job, and by how much.
    """

    situation: Situation
    days: float
    interval_s: float
    daly_s: float
    simulated_s: float
    formula: float
    effective: float
    lowest: float
    highest: float
    ends_after: tuple[float, float, float]
    interruptions: tuple[float, float, float]
    lost_h: float
    saves_h: float
    restarts_h: float
    queue_h: float
    best_saves_h: float
    worth: Sequence[Worth]

    def to_dict(self) -> dict[str, Any]:
        """As JSON; what never ends is None."""

        def plain(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: plain(one) for key, one in value.items()}
            if isinstance(value, list | tuple):
                return [plain(one) for one in value]
            return None if isinstance(value, float) and not math.isfinite(value) else value

        found: dict[str, Any] = plain(asdict(self))
        return found

    def lines(self) -> Iterator[str]:
        """What a person reads."""
        now = self.situation
        spares = f" and {counted(now.spares, 'spare')}" if now.spares else ""
        nodes = f"{now.nodes:,} nodes" if now.nodes > 1 else "1 node"
        if self.interruptions[0] < 0.1 and self.effective > 0.98:
            yield f"Goodput: nothing fails in 9 of 10 such jobs, of {duration(self.days * DAY_S)} on {nodes}"
            return
        yield f"Goodput: {duration(self.days * DAY_S)} of training on {nodes}{spares}"
        if not math.isfinite(self.ends_after[0]):
            every = duration(self.interval_s)
            yield f"  it does not end: {self.formula:.1%} of the time counts with a save every {every}"
        else:
            ends, low, high = (duration(days * DAY_S) for days in self.ends_after)
            yield f"  ends after {ends} (90 % of such jobs: {low} to {high})"
            yield f"  {self.effective:.1%} of the time counts ({self.lowest:.1%} to {self.highest:.1%})"
            mean, few, many = self.interruptions
            hours = f"lost work {_hours(self.lost_h)}, saves {_hours(self.saves_h)}, "
            hours += f"restarts {_hours(self.restarts_h)}, queue {_hours(self.queue_h)}"
            yield f"  {mean:.3g} interruptions ({few:.0f} to {many:.0f}); {hours}"
        if self.daly_s >= self.days * DAY_S:
            yield "  best: one save, at the end: it fails too seldom for more"
        else:
            text = f"  best: a save every {duration(self.daly_s)} of training (Daly; "
            text += f"simulated {duration(self.simulated_s)})"
            if self.best_saves_h:
                text += f"; this job's {duration(self.interval_s)} cost {_hours(self.best_saves_h)}"
            yield text
        worth = [f"{one.change} {_hours(one.hours)}" for one in self.worth if one.hours >= 0.05]
        if worth:
            yield f"  worth: {', '.join(worth)}"
        yield "  from:"
        for name, label in _LABELS.items():
            figure: Figure = getattr(now, name)
            text = duration(figure.value) if name.endswith("_s") else f"{figure.value:.3g}"
            yield f"    {label.format(text)} ({figure.source})"


def _hours(hours: float) -> str:
    return f"{hours:.3g} h" if hours >= 1 else duration(hours * 3600)


_LABELS: Final = {
    "failures": "{} failures a day of 1,000 nodes",
    "save_s": "{} of waiting for a save",
    "durable_s": "{} until it is durable",
    "restart_s": "{} for a restart",
    "queue_s": "{} in the queue, where a node is lost and no spare is left",
    "repair_s": "{} until a lost node is a spare",
    "node_share": "{} of the failures lose their node",
}
"""The figures of a situation, and how each is shown."""


def situation(
    nodes: int,
    *,
    spares: int = 0,
    measured: Measured | None = None,
    failures: float | None = None,
    save_s: float | None = None,
    durable_s: float | None = None,
    restart_s: float | None = None,
    queue_s: float | None = None,
    repair_s: float | None = None,
    state_bytes: float | None = None,
    writers: int | None = None,
    asynchronous: bool = False,
) -> Situation:
    """Of each figure what is given, else what a history says, else what is assumed.

    Args:
        nodes: How many work.
        spares: Further ones of the allocation.
        measured: What histories say, `fairlead_runs.checkpoint_interval.measured(paths)`; a rate only of two failures.
        failures: Those of 1,000 nodes in a day.
        save_s: Seconds for which training waits at each save; `durable_s`, `restart_s`, `queue_s` and `repair_s` are as
            `Situation` has them.
        durable_s: Seconds until a checkpoint is durable.
        restart_s: Seconds of a restart.
        queue_s: Seconds in the queue.
        repair_s: Seconds of a repair.
        state_bytes: Bytes of a checkpoint, by which a save is estimated if nothing else says how long it takes.
        writers: How many of the nodes write it; None: all.
        asynchronous: Whether the training continues while a checkpoint is written.

    Raises:
        ConfigError: There are no nodes, or a figure is negative.
    """
    given = {"failures": failures, "save_s": save_s, "durable_s": durable_s, "restart_s": restart_s}
    given |= {"queue_s": queue_s, "repair_s": repair_s}
    wrong = next((name for name, value in given.items() if value is not None and value < 0), None)
    if nodes < 1 or spares < 0 or wrong is not None:
        what = f"{wrong} is negative" if wrong else f"there are no {nodes} nodes and {spares} spares"
        raise ConfigError(what, where="the forecast of goodput", fix="nodes from 1 on, all else from 0 on")
    known: dict[str, Figure] = {}
    observed = None
    if measured is not None:
        history = "measured in the history"
        for name, value in (("save_s", measured.save_s), ("durable_s", measured.durable_s)):
            known |= {name: Figure(value, history)} if value is not None else {}
        known |= {"restart_s": Figure(measured.restart_s, history)} if measured.restart_s is not None else {}
        if measured.wait_s is not None:
            known["queue_s"] = Figure(measured.wait_s, history)
            known["node_share"] = Figure(1.0, "the wait in the history is that of every failure")
        if measured.failures >= LEAST_FAILURES and failures is None:
            observed = measured.failures
            days = measured.node_s / DAY_S
            text = f"measured: {measured.failures} failures in {days:.3g} node-days"
            known["failures"] = Figure(measured.failures / days * 1000, text)
    if state_bytes is not None and "save_s" not in known:
        rate, writers = ASSUMED["node_gb_s"], writers or nodes
        size = f"{state_bytes / 1e9:.3g} GB"
        by = f"{size} by {counted(writers, 'node')} at {rate.value:g} GB/s each; {rate.source}"
        known["durable_s"] = Figure(state_bytes / writers / rate.value / 1e9, by)
        # PCIe 4, 25 GB/s for each of eight devices: what a data sheet promises, halved.
        copied = Figure(
            state_bytes / writers / 1e11, f"{size} from {counted(writers, 'node')} to the host at 100 GB/s each"
        )
        known["save_s"] = copied if asynchronous else known["durable_s"]
    known |= {name: Figure(float(value), "given") for name, value in given.items() if value is not None}
    if "durable_s" not in known or (save_s is not None and durable_s is None):
        save = known.get("save_s", ASSUMED["save_s"])
        known["durable_s"] = Figure(save.value, "as long as the training waits")
    fields = {name: known.get(name, ASSUMED.get(name)) for name in _LABELS}
    return Situation(nodes, spares, observed=observed, **fields)  # type: ignore[arg-type]


def goodput_forecast(
    nodes: int, days: float, *, interval_s: float | None = None, seed: int = 0, **figures: Any
) -> GoodputForecast:
    """What failures will cost a job of so many days of training on so many nodes.

    Args:
        nodes: How many work.
        days: Of training, without saves and failures: steps x seconds of a step.
        interval_s: Seconds of training between the job's saves; None: the best.
        seed: Of the simulated failures.
        figures: See `situation`: spares, measured, failures, save_s, durable_s, restart_s, queue_s, ...

    Raises:
        ConfigError: A figure is negative.

    Example:
        >>> llama = goodput_forecast(2048, 50, spares=16, save_s=5, restart_s=600)
        >>> round(llama.effective, 2), round(llama.daly_s)
        (0.92, 330)
    """
    now = situation(nodes, **figures)
    if days <= 0 or (interval_s is not None and interval_s <= 0):
        raise ConfigError("a job takes time", where="the forecast of goodput", fix="days, and seconds, above 0")
    work = days * DAY_S
    daly = now.costs.best_interval() if now.failure_s < math.inf else math.inf
    interval = interval_s if interval_s is not None else min(daly, work)
    formula = now.costs.effective(interval) if now.failure_s < math.inf else interval / (interval + now.save_s.value)
    if formula < _HOPELESS:
        never = (math.inf,) * 3
        worth: list[Worth] = []
        return GoodputForecast(
            now, days, interval, daly, daly, formula, formula, formula, formula, never, never, 0, 0, 0, 0, 0, worth
        )
    trials = max(40, min(200, int(_MOST_FAILURES / (1 + work / formula / now.failure_s))))
    played = _play(now, work, interval, trials, seed)
    clocks = sorted(one.clock for one in played)
    mean = statistics.mean(clocks)

    def ends(changed: Situation, every: float) -> float:
        few = max(20, trials // 2)
        if changed.costs.effective(every) < _HOPELESS:
            return math.inf
        return statistics.mean(one.clock for one in _play(changed, work, every, few, seed))

    candidates = [min(daly * factor, work) for factor in _FACTORS] if daly < work else [work]
    took = {every: ends(now, every) for every in candidates}
    simulated = min(took, key=lambda every: took[every])
    base = took[min(daly, work)]
    changes = {
        "one more spare node": replace(now, spares=now.spares + 1),
        "saves in half the time": replace(now, save_s=_half(now.save_s), durable_s=_half(now.durable_s)),
        "restarts in half the time": replace(now, restart_s=_half(now.restart_s)),
        "half the wait in the queue": replace(now, queue_s=_half(now.queue_s)),
    }
    worths = [
        Worth(change, max(0.0, base - ends(one, min(one.costs.best_interval(), work))) / 3600)
        for change, one in changes.items()
        if now.failure_s < math.inf
    ]
    counts = sorted(one.failures for one in played)
    return GoodputForecast(
        situation=now,
        days=days,
        interval_s=interval,
        daly_s=daly,
        simulated_s=simulated,
        formula=formula,
        effective=work / mean,
        lowest=work / _at(clocks, 0.95),
        highest=work / _at(clocks, 0.05),
        ends_after=(mean / DAY_S, _at(clocks, 0.05) / DAY_S, _at(clocks, 0.95) / DAY_S),
        interruptions=(statistics.mean(counts), _at(counts, 0.05), _at(counts, 0.95)),
        lost_h=statistics.mean(one.lost for one in played) / 3600,
        saves_h=statistics.mean(one.saving for one in played) / 3600,
        restarts_h=statistics.mean(one.restarting for one in played) / 3600,
        queue_h=statistics.mean(one.queued for one in played) / 3600,
        best_saves_h=max(0.0, mean - base) / 3600 if interval_s is not None else 0.0,
        worth=sorted(worths, key=lambda one: -one.hours),
    )


def _half(figure: Figure) -> Figure:
    return Figure(figure.value / 2, f"half of: {figure.source}")


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class _Played:
    """One job, played to its end: seconds, and how often it failed."""

    clock: float = 0.0
    saving: float = 0.0
    lost: float = 0.0
    restarting: float = 0.0
    queued: float = 0.0
    failures: int = 0


def _play(now: Situation, work: float, interval: float, trials: int, seed: int) -> list[_Played]:
    """Each of them with different failures, which are the same whatever the interval and the costs are."""
    return [_one(now, work, interval, random.Random(f"{seed}-{trial}")) for trial in range(trials)]


def _one(now: Situation, work: float, interval: float, numbers: random.Random) -> _Played:
    save, durable = now.save_s.value, max(now.durable_s.value, now.save_s.value)
    period = interval + save
    failure_s = now.failure_s
    if now.observed:  # as uncertain as so few failures make it
        failure_s *= now.observed / numbers.gammavariate(now.observed, 1.0)
    job, productive = _Played(), 0.0
    spares = now.spares
    repaired: list[float] = []  # when each lost node is a spare
    for first in itertools.chain([True], itertools.repeat(False)):
        fails = numbers.expovariate(1.0) * failure_s
        broken = numbers.random() < now.node_share.value
        restart = 0.0 if first else now.restart_s.value
        left = work - productive
        saves = math.ceil(left / interval - 1e-9)  # the last one at the end
        if fails >= restart + left + saves * save:
            job.restarting += restart
            job.saving += saves * save
            job.clock += restart + left + saves * save
            return job
        job.failures += 1
        job.clock += fails
        job.restarting += min(restart, fails)
        ran = max(0.0, fails - restart)
        finished = max(0, math.floor((ran - interval - durable) / period) + 1)
        done = int(ran / period)
        productive += finished * interval
        job.saving += done * save
        job.lost += ran - done * save - finished * interval
        if broken:
            while repaired and repaired[0] <= job.clock:
                heapq.heappop(repaired)
                spares += 1
            if spares:
                spares -= 1
                heapq.heappush(repaired, job.clock + now.repair_s.value)
            else:  # another allocation, with all its nodes
                job.queued += now.queue_s.value
                job.clock += now.queue_s.value
                spares, repaired = now.spares, []
    raise AssertionError("a job ends")
