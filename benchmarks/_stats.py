"""What the benchmarks share: turns taken side by side, ratios with their interval, and the document that is printed.

Two things are compared by taking turns, A B B A A B ..., so that what disturbs the machine disturbs both.  The ratio is
formed within each turn; the median of these ratios is quoted, with its 95 % interval by the percentile bootstrap (Efron
and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

__all__ = ["Options", "Ratio", "machine", "options", "paired_ratio", "report", "take_turns"]

RESAMPLES: Final = 4000
PEERS_SPREAD: Final = 0.03
"""A bound of 1.00 asks for "no slower"; the far end of the interval may lie this far beyond it, not more."""


@dataclass(frozen=True)
class Options:
    """What every benchmark takes on its command line.

    Attributes:
        json: Print the document instead of a table.
        quick: As short as it can be: shows that the benchmark works; its figures mean nothing.
        rounds: How often each side has its turn.
    """

    json: bool
    quick: bool
    rounds: int
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What else it takes, by name."""


@dataclass(frozen=True)
class Ratio:
    """A ratio with the 95 % interval of its median, and the bound that it must keep, if there is one.

    Smaller is better, or larger, where the bound is what it must be `at_least`.
    """

    median: float
    low: float
    high: float
    bound: float | None = None
    at_least: bool = False

    @property
    def holds(self) -> bool | None:
        """Whether the whole interval keeps the bound; a bound of 1.00 is "no slower". None: there is no bound."""
        if self.bound is None:
            return None
        if self.at_least:
            near, far = 1 / self.high, 1 / self.low if self.low > 0 else math.inf
            return Ratio(1 / self.median, near, far, 1 / self.bound).holds
        if self.bound == 1.0:
            return self.low <= 1.0 and self.high < 1.0 + PEERS_SPREAD
        return self.high < self.bound


def options(description: str | None, *, rounds: int, quick: int = 2, **numbers: float) -> Options:
    """Reads the command line.

    Args:
        description: The docstring of the benchmark.
        rounds: How often each side has its turn, unless `--rounds` says otherwise.
        quick: The same with `--quick`.
        numbers: Further options that are numbers, with their defaults.
    """
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="only show that it works")
    parser.add_argument("--rounds", type=int, help=f"turns of each side (default: {rounds})")
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=float, default=default, help=f"default: {default:g}")
    given = parser.parse_args()
    taken = {name: float(getattr(given, name)) for name in numbers}
    return Options(given.json, given.quick, given.rounds or (quick if given.quick else rounds), taken)


def take_turns(sides: Mapping[str, Callable[[], float]], rounds: int, *, warm_up: int = 1) -> dict[str, list[float]]:
    """Calls the sides in turn, each second time in the opposite order, and returns what they measured.

    Args:
        sides: What measures one turn of each side, in seconds.
        rounds: How many turns are kept.
        warm_up: How many are discarded before them.
    """
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(warm_up + rounds):
        for name in sides if turn % 2 == 0 else reversed(list(sides)):
            seconds = sides[name]()
            if turn >= warm_up:
                taken[name].append(seconds)
    return taken


def paired_ratio(
    ours: Sequence[float], theirs: Sequence[float], *, bound: float | None = None, at_least: bool = False
) -> Ratio:
    """The median of the ratios of each turn.

    Args:
        ours: Seconds of each turn.
        theirs: Seconds of the same turns.
        bound: What the ratio must keep.
        at_least: The bound is a lower one: of a speed, whose larger values are better.

    Example:
        >>> paired_ratio([2.0, 2.0], [1.0, 1.0]).median
        2.0
    """
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    chance = random.Random(0)  # the same interval for the same measurements
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    low, high = medians[round(0.025 * (RESAMPLES - 1))], medians[round(0.975 * (RESAMPLES - 1))]
    return Ratio(statistics.median(ratios), low, high, bound, at_least)


def machine() -> dict[str, Any]:
    """Where this was measured; only what stays the same from one benchmark to the next."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "lightning")},
        **_gpu(),
        "commit": _commit(),
    }


def report(
    name: str,
    ratios: Mapping[str, Ratio],
    seconds: Mapping[str, Sequence[float]],
    given: Options,
    **raw: Any,
) -> None:
    """Prints the document, or a table of it.

    Args:
        name: The benchmark.
        ratios: By the names that the documentation quotes.
        seconds: What each side measured, turn by turn.
        given: The command line.
        raw: Whatever else tells how the figures came about.
    """
    load = os.getloadavg()[0]
    if given.json:
        document = {
            "name": name,
            "ratios": {key: asdict(ratio) for key, ratio in ratios.items()},
            "raw": {
                "seconds": {side: _spread(values) for side, values in seconds.items()},
                "rounds": given.rounds,
                "load_average": round(load, 2),
                **raw,
            },
            "machine": machine(),
        }
        print(json.dumps(document))
        return
    for key, ratio in ratios.items():
        bound = f"at least {ratio.bound}" if ratio.at_least else str(ratio.bound)
        verdict = {None: "", True: f"  keeps {bound}", False: f"  does not keep {bound}"}[ratio.holds]
        print(f"{key:28} {ratio.median:.3f}  [{ratio.low:.3f}, {ratio.high:.3f}]{verdict}")
    for side, values in seconds.items():
        spread = _spread(values)
        print(f"  {side:26} {spread['median'] * 1e3:9.3f} ms  [{spread['low'] * 1e3:.3f}, {spread['high'] * 1e3:.3f}]")
    for key, value in raw.items():
        print(f"  {key}: {value}")
    print(f"  {given.rounds} rounds, load average {load:.1f}")


def _spread(values: Sequence[float]) -> dict[str, float]:
    """The median, and the range that holds the middle 90 % of the turns."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered),
        "low": ordered[round(0.05 * last)],
        "high": ordered[round(0.95 * last)],
    }


def _cpu() -> str:
    """The processor's name; `platform.processor()` does not know it on Linux."""
    info = Path("/proc/cpuinfo")
    if sys.platform == "linux" and info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _gpu() -> dict[str, str]:
    """The card, where a benchmark has used torch and there is one."""
    torch = sys.modules.get("torch")
    return {"gpu": torch.cuda.get_device_name()} if torch is not None and torch.cuda.is_available() else {}


def _commit() -> str:
    """The commit of this checkout, with a + where it was changed; empty outside of one."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
