"""What was predicted of a run, `plan.json` in its directory, beside what its last start has measured. Torch-free."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fairlead.errors import ConfigError, RunDirectoryError
from fairlead_runs.commit import atomic_write
from fairlead_runs.describe import duration
from fairlead_runs.goodput import COMMUNICATION, Goodput, StartTimes, goodput, timed_events
from fairlead_runs.states import PLAN_FILE

STEP_TERMS: Final = ("compute_s", "exposed_communication_s", "bubble_s", "optimizer_s", "host_s")
"""What a predicted step consists of."""
FIGURES: Final = ("step_s", *STEP_TERMS, "samples_s", "tokens_s", "memory_bytes", "goodput")


@dataclass(frozen=True)
class Pair:
    """A figure that was predicted, and what was measured.

    Attributes:
        name: As `step`, `compute`, `memory`.
        unit: `s`, `bytes`, `share`, or `1/s`.
        part: Whether it is one of those that a step consists of.
    """

    name: str
    predicted: float
    measured: float
    unit: str
    part: bool = False

    @property
    def error(self) -> float | None:
        """By which share of the measured figure the prediction is too high; None: nothing was measured."""
        return self.predicted / self.measured - 1 if self.measured else None


@dataclass(frozen=True)
class Comparison:
    """A prediction beside what its run has measured.

    Attributes:
        predicted: The content of `plan.json`.
        pairs: The figures that both have.
        why_not: Why nothing can be compared; empty: it can.
        start: The start that has measured.
    """

    predicted: Mapping[str, Any]
    pairs: tuple[Pair, ...]
    why_not: str = ""
    start: int = 0

    @property
    def worst(self) -> Pair | None:
        """The part of a step that is wrong by the most seconds; None: no part of it was measured."""
        parts = [one for one in self.pairs if one.part]
        return max(parts, key=lambda one: abs(one.predicted - one.measured), default=None)

    def sentence(self) -> str:
        """The comparison in one line."""
        if self.why_not:
            return f"not compared with the plan: {self.why_not}"
        step = next((one for one in self.pairs if one.name == "step"), None)
        if step is None or step.error is None:
            return "the plan predicts nothing of it that was measured"
        text = f"a step was planned with {shown(step.predicted, 's')} and takes {shown(step.measured, 's')}"
        if self.worst is not None:
            off = self.worst.predicted - self.worst.measured
            direction = "too long" if off > 0 else "too short"
            text += f"; the plan is most wrong in {self.worst.name}, {shown(abs(off), 's')} {direction}"
        return text


def write_plan(
    run: Path, figures: Mapping[str, Any], *, device: str, layout: Mapping[str, Any], ranks: int, rates: float = 1.0
) -> Path:
    """Writes what is predicted of a run into its directory, which need not be there yet; returns the file.

    Args:
        run: The run directory.
        figures: Those of `FIGURES` that are known, in seconds, bytes, and shares; all others are left out.
        device: As `resources.device` names it.
        layout: What was chosen, for who reads it.
        ranks: For how many it is predicted.
        rates: By how much recorded runs have already made the kernels faster in it.

    Raises:
        RunDirectoryError: It cannot be written.
    """
    known = {name: float(figures[name]) for name in FIGURES if figures.get(name) is not None}
    content = {
        "format": 1,
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device,
        "ranks": ranks,
        "layout": dict(layout),
        "rates": rates,
        "predicted": known,
    }
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = "cannot create the run directory"
        raise RunDirectoryError(what, where=str(run), why=error.strerror or str(error)) from error
    file = run / PLAN_FILE
    atomic_write(file, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode(), error=RunDirectoryError)
    return file


def read_plan(run: Path) -> dict[str, Any] | None:
    """What was predicted of a run; None: nothing was, or the file is damaged."""
    try:
        found = json.loads((run / PLAN_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("predicted"), dict) else None


def compare(run: Path, went: Goodput | None = None) -> Comparison | None:
    """The prediction of a run beside what its last start with steps has measured; None: nothing was predicted."""
    plan = read_plan(run)
    if plan is None:
        return None
    went = went if went is not None else goodput(run)
    start = next((one for one in reversed(went.starts) if any(rank.mean_s for rank in one.ranks)), None)
    if start is None:
        return Comparison(plan, (), "no step was measured")
    if plan.get("ranks") != start.world_size:
        why = f"it is for {plan.get('ranks')} ranks, and start {start.number} has {start.world_size}"
        return Comparison(plan, (), why, start.number)
    batches = [one for one in timed_events(run) if one["event"] == "batch" and one.get("start") == start.number]
    samples = batches[-1].get("samples") if batches else None
    pairs = tuple(_pairs(plan["predicted"], start, samples, went.share))
    return Comparison(plan, pairs, "", start.number)


def _pairs(
    predicted: Mapping[str, float], start: StartTimes, samples: int | None, share: float | None
) -> Iterator[Pair]:
    ranks = [one for one in start.ranks if one.mean_s]
    step_s = statistics.median(one.mean_s or 0.0 for one in ranks)
    part = {
        name: step_s * statistics.median(one.shares.get(name, 0.0) for one in ranks)
        for name in ("data", "forward", "backward", "compute", COMMUNICATION, "optimizer", "logging")
    }

    def planned(*names: str) -> float | None:
        known = [predicted[name] for name in names if name in predicted]
        return sum(known) if known else None

    passes = part["forward"] + part["backward"] + part["compute"]
    found: list[tuple[str, float | None, float, str, bool]] = [("step", planned("step_s"), step_s, "s", False)]
    if all("comm_bytes" in one.facts for one in ranks):  # only DDP says what of the backward pass waits for others
        found.append(("compute", planned("compute_s", "bubble_s"), passes, "s", True))
        found.append(("communication", planned("exposed_communication_s"), part[COMMUNICATION], "s", True))
    else:
        both = planned("compute_s", "bubble_s", "exposed_communication_s")
        found.append(("compute and communication", both, passes, "s", True))
    found.append(("optimizer", planned("optimizer_s"), part["optimizer"], "s", True))
    found.append(("host and data", planned("host_s"), part["data"] + part["logging"], "s", True))
    rate = samples / step_s if samples else None
    if rate is not None:
        found.append(("samples", planned("samples_s"), rate, "1/s", False))
        if predicted.get("samples_s") and "tokens_s" in predicted:
            found.append(
                ("tokens", predicted["tokens_s"], rate * predicted["tokens_s"] / predicted["samples_s"], "1/s", False)
            )
    memory = max((one.facts.get("device_memory", 0.0) for one in ranks), default=0.0)
    if memory:  # the host's is that of the full process, which no plan covers
        found.append(("memory of the fullest rank", planned("memory_bytes"), memory, "bytes", False))
    if share is not None:
        found.append(("goodput", planned("goodput"), share, "share", False))
    for name, value, measured, unit, of_step in found:
        if value is not None:
            yield Pair(name, value, measured, unit, of_step)


def shown(value: float, unit: str) -> str:
    """A figure in words.

    Example:
        >>> shown(0.25, "s"), shown(2**34, "bytes"), shown(0.93, "share")
        ('250 ms', '16 GiB', '93.0%')
    """
    if unit == "s":
        return duration(value)
    if unit == "bytes":
        return f"{value / 2**30:.4g} GiB"
    return f"{value:.1%}" if unit == "share" else f"{value:,.4g} a second"


def record(comparison: Comparison, run: Path) -> dict[str, Any]:
    """The pair as a calibration file collects it: what was predicted, what was measured, on which device.

    Raises:
        ConfigError: Nothing can be compared.
    """
    if comparison.why_not or not comparison.pairs:
        raise ConfigError(
            f"{run.name} has nothing to record",
            where="--record",
            why=comparison.why_not or "the plan predicts nothing that was measured",
            fix="record a run that has trained as it was planned",
        )
    plan = comparison.predicted
    compute = next((one for one in comparison.pairs if one.name.startswith("compute") and one.measured), None)
    rates = None if compute is None else float(plan.get("rates", 1.0)) * compute.predicted / compute.measured
    return {
        "run": str(run),
        "start": comparison.start,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "ranks": plan.get("ranks"),
        "layout": plan.get("layout"),
        "rates": rates,  # by how much kernels are faster than those of a plan without any recorded run
        "predicted": plan["predicted"],
        "measured": {one.name.replace(" ", "_"): one.measured for one in comparison.pairs},
    }
