"""From what the nodes say to who is bad: only what fails counts, and only against whom it tells from the others."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from fairlead_diagnostics.checking import Check, Result
from fairlead_diagnostics.checks.clock import SKEW_S
from fairlead_diagnostics.pairs import Pair, blame

SLOW: Final = 2.0
"""A node that takes this many times the median of the others is worth a warning, and no more."""
_SLOW_S: Final = 0.5
"""Seconds that it has to be slower at least."""


@dataclass(frozen=True)
class NodeReport:
    """What one node has seen.

    Args:
        host: Its name.
        results: Of the checks that it made for itself, and of the names.
        pairs: Of the all-reduce with each partner.
        offset_s: Seconds by which the clock of node 0 is ahead of this one.
    """

    host: str
    results: Mapping[str, Result] = field(default_factory=dict)
    pairs: Mapping[int, Result] = field(default_factory=dict)
    offset_s: float = 0.0

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "host": self.host,
            "checks": {name: result.plain() for name, result in self.results.items()},
            "pairs": {str(node): result.plain() for node, result in self.pairs.items()},
            "offset_s": self.offset_s,
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """Back from `plain`."""
        results = {name: Result.of(one) for name, one in plain["checks"].items()}
        pairs = {int(node): Result.of(one) for node, one in plain["pairs"].items()}
        return cls(plain["host"], results, pairs, plain["offset_s"])


@dataclass(frozen=True)
class Verdict:
    """What a screen has found.

    Args:
        bad: The nodes that are at fault, each with what failed.
        unclear: What failed and cannot be attributed to one node.
        warnings: What is worth a look, and does not keep the job from training.
        not_made: Checks that were not made anywhere, and why.
    """

    bad: Mapping[int, Sequence[str]]
    unclear: Sequence[str]
    warnings: Sequence[str]
    not_made: Sequence[str]

    @property
    def fit(self) -> bool:
        """Whether the ranks can be started."""
        return not self.bad and not self.unclear


def judge(
    reports: Mapping[int, NodeReport], gone: Mapping[int, str], hosts: Mapping[int, str], checks: Sequence[Check]
) -> Verdict:
    """Who is bad.

    A check that fails on all nodes alike is no node's fault: it is the job's, or that of what they share. On one node
    alone there is no other to compare with, and only what is `sure` counts against it.

    Args:
        reports: Of the nodes that came.
        gone: The nodes that did not, or were lost, and why.
        hosts: The name of each node.
        checks: Those that each node made for itself.
    """
    bad: dict[int, list[str]] = {}
    unclear: list[str] = []
    for check in checks:
        made = {node: one.results[check.name] for node, one in reports.items() if check.name in one.results}
        failed = {node: result for node, result in made.items() if result.ok is False}
        alike = len(failed) == len(made) and not (check.sure and len(made) == 1)
        if failed and alike:
            where = "on every node" if len(made) > 1 else "on the only node"
            unclear.append(f"{check.name} fails {where}: {next(iter(failed.values())).detail}")
        elif failed:
            for node, result in failed.items():
                bad.setdefault(node, []).append(f"{check.name}: {result.detail}")
    for name, tried, failures in _between(reports, gone, hosts):
        guilty, open_pairs = blame(tried)
        for node in guilty:
            seen = [text for pair, texts in failures.items() if node in pair and not tried[pair] for text in texts]
            seen = [text.removeprefix(f"{hosts[node]}: ") for text in seen]
            bad.setdefault(node, []).append(f"{name}: {'; '.join(dict.fromkeys(seen[:4]))}")
        pairs = [pair for pair in open_pairs if not set(pair) & guilty]
        if pairs:
            shown = "; ".join(text for pair in pairs[:4] for text in failures[pair])
            unclear.append(f"{name}, and the node at fault is unknown: {shown}")
    return Verdict(
        {node: bad[node] for node in sorted(bad)}, unclear, _warnings(reports, hosts), _not_made(reports, checks)
    )


def _between(
    reports: Mapping[int, NodeReport], gone: Mapping[int, str], hosts: Mapping[int, str]
) -> list[tuple[str, dict[Pair, bool], dict[Pair, list[str]]]]:
    """What nodes tried with each other, by pair: whether both succeeded, and what they say where not."""
    came: tuple[dict[Pair, bool], dict[Pair, list[str]]] = ({}, {})
    for node in sorted({*reports, *gone} - {0}):
        came[0][0, node] = node not in gone
        came[1][0, node] = [f"{hosts[node]}: {gone[node]}"] if node in gone else []
    found = [("not there", *came)]
    for name in ("names", "all-reduce"):
        tried: dict[Pair, bool] = {}
        failures: dict[Pair, list[str]] = {}
        for node, report in sorted(reports.items()):
            for other, why in _tried(name, report, reports).items():
                if node == other:
                    continue
                pair = (min(node, other), max(node, other))
                tried[pair] = tried.get(pair, True) and why is None
                failures.setdefault(pair, []).extend([f"{hosts[node]} with {hosts[other]}: {why}"] if why else [])
        found.append((name, tried, failures))
    return found


def _tried(name: str, report: NodeReport, reports: Mapping[int, NodeReport]) -> dict[int, str | None]:
    """With which nodes one has tried something, and why it failed; None: it did not."""
    if name == "all-reduce":
        made = {node: result for node, result in report.pairs.items() if result.ok is not None and node in reports}
        return {node: None if result.ok else result.detail for node, result in made.items()}
    result = report.results.get(name)
    if result is None or result.ok is None:
        return {}
    if result.ok is False and not result.failed:  # it hung, or crashed: with everybody
        return dict.fromkeys(reports, result.detail)
    return {node: result.failed.get(node) for node in reports}


def _warnings(reports: Mapping[int, NodeReport], hosts: Mapping[int, str]) -> list[str]:
    failures = [
        f"{hosts[node]}: {name}: {result.detail}"
        for node, report in sorted(reports.items())
        for name, result in report.results.items()
        if result.warns and result.ok
    ]
    times: dict[str, dict[int, float]] = {}
    for node, report in sorted(reports.items()):
        for name, result in report.results.items():
            if result.ok and result.seconds is not None:
                times.setdefault(name, {})[node] = result.seconds
        # A slow node slows all of its partners: what counts is how it does at best.
        best = min((one.seconds for one in report.pairs.values() if one.ok and one.seconds is not None), default=None)
        if best is not None:
            times.setdefault("all-reduce", {})[node] = best
    for name, taken in times.items():
        for node, seconds in taken.items():
            others = [one for other, one in taken.items() if other != node]
            usual = statistics.median(others) if len(others) > 1 else seconds
            if seconds > SLOW * usual and seconds > usual + _SLOW_S:
                failures.append(
                    f"{hosts[node]} is slow: {name} took {seconds:.2f} s; the median of the others is {usual:.2f} s"
                )
    middle = statistics.median(report.offset_s for report in reports.values()) if reports else 0.0
    for node, report in sorted(reports.items()):
        if abs(skew := middle - report.offset_s) > SKEW_S:
            failures.append(
                f"{hosts[node]}: its clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} the others'"
            )
    return failures


def _not_made(reports: Mapping[int, NodeReport], checks: Sequence[Check]) -> list[str]:
    failures = []
    for name in (*(check.name for check in checks), "all-reduce"):
        found = [report.results[name] for report in reports.values() if name in report.results]
        if found and all(result.ok is None for result in found):
            failures.append(f"{name}: {found[0].detail}")
    return failures
