"""A screen and a look at one machine, as a person and as a program read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fairlead_diagnostics.checking import Result
from fairlead_diagnostics.outcome import Outcome
from fairlead_diagnostics.screen import Screened


def here_lines(results: Mapping[str, Result]) -> list[str]:
    """One line for each check of one machine, and whether it is fit."""
    width = max(map(len, results))
    lines = [f"{name:<{width}}  {_state(result)}{result.detail}" for name, result in results.items()]
    unfit = [name for name, result in results.items() if result.ok is False]
    return [*lines, f"unfit: {', '.join(unfit)}" if unfit else "fit"]


def here_document(results: Mapping[str, Result]) -> dict[str, Any]:
    """The same for `--json`."""
    fit = all(result.ok is not False for result in results.values())
    return {"fit": fit, "checks": {name: result.plain() for name, result in results.items()}}


def _state(result: Result) -> str:
    if result.ok is None:
        return "not looked at: "
    return "UNFIT: " if not result.ok else "warning: " if result.warns else ""


def screen_lines(screened: Screened) -> list[str]:
    """What a screen of several nodes has found, what is bad first; once it is decided, what was done."""
    if screened.outcome is not None:
        return [f"  {text}" for text in screened.outcome.lines]
    verdict, hosts = screened.verdict, screened.hosts
    bad = len(verdict.bad)
    count = f"{len(hosts)} node{'s' if len(hosts) > 1 else ''}"
    summary = f"{bad} bad" if bad else "all fit" if verdict.fit else "unfit"
    lines = [f"doctor: {count} screened in {screened.seconds:.1f} s: {summary}"]
    for node, reasons in verdict.bad.items():
        lines += [f"  bad: {hosts[node]}: {reason}" for reason in reasons]
    lines += [f"  unfit: {text}" for text in verdict.unclear]
    lines += [f"  warning: {text}" for text in verdict.warnings]
    return [*lines, *(f"  not made: {text}" for text in verdict.not_made)]


def screen_document(screened: Screened, outcome: Outcome) -> dict[str, Any]:
    """All of it for `--json`, with what each node has seen."""
    verdict, hosts = screened.verdict, screened.hosts
    return {
        "fit": verdict.fit,
        "seconds": round(screened.seconds, 3),
        "bad": [{"host": hosts[node], "why": list(reasons)} for node, reasons in verdict.bad.items()],
        "unclear": list(verdict.unclear),
        "warnings": list(verdict.warnings),
        "not_made": list(verdict.not_made),
        "outcome": {
            "code": outcome.code,
            "excluded": list(outcome.excluded),
            "lines": list(outcome.lines),
        },
        "nodes": _nodes(screened, hosts),
    }


def _nodes(screened: Screened, hosts: Mapping[int, str]) -> Sequence[Mapping[str, Any]]:
    found = []
    for node in sorted(hosts):
        report = screened.reports.get(node)
        summary = report.plain() if report is not None else {"host": hosts[node], "gone": screened.gone.get(node)}
        found.append({"node": node, **summary})
    return found
