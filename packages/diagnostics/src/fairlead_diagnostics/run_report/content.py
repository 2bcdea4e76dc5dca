"""What a report says of a run, read from its directory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fairlead.exactness import Recorded, last_record, sentence
from fairlead.findings import Finding
from fairlead_diagnostics.run_report.curves import Clock, Curve, read_curves
from fairlead_runs import RunState, state
from fairlead_runs.checkpoint_interval import interval_finding
from fairlead_runs.commands.status import find_stuck, stuck_line
from fairlead_runs.goodput import Goodput, event_time, goodput, timed_events
from fairlead_runs.predicted import Comparison, compare
from fairlead_runs.step_findings import step_findings
from fairlead_runs.step_times import read_series

_SHOWN: Final = {
    "start": "start",
    "signal": "signal",
    "stop": "stop",
    "requeue": "requeue",
    "checkpoint": "checkpoint",
    "checkpoint-failed": "failed save",
    "upload-failed": "failed upload",
    "failed": "failure",
    "hang": "hang",
    "finished": "finished",
    "diverged": "replicas differ",
    "not-finite": "not finite",
    "excluded": "excluded node",
    "switch": "control file",
}
"""The events of a history that the timeline shows, and what they are called there."""
_TEXTS: Final = ("reason", "error", "why", "by", "nodes", "file", "signals")
_MOST_EVENTS: Final = 2000


@dataclass(frozen=True)
class Moment:
    """An event on the timeline."""

    time: float
    kind: str
    start: int
    step: int | None
    text: str


@dataclass(frozen=True)
class RunContent:
    """All that a report says of one run.

    Attributes:
        run: Its state.
        goodput: Where its time went.
        moments: What happened to it.
        curves: Its metrics, by name.
        clock: When each of its steps was done.
        findings: What slows its steps, of the last start that has measured any.
        settings: Each setting of its last start with its value and the reason.
        provenance: Code, environment and hardware of its last start.
        exactness: What its last start has recorded against an exact resume.
        comparison: What was predicted of it beside what it measured; None: nothing was.
    """

    run: RunState
    goodput: Goodput
    moments: Sequence[Moment]
    curves: Mapping[str, Curve]
    clock: Clock
    findings: Sequence[Finding]
    settings: Mapping[str, Mapping[str, Any]]
    provenance: Mapping[str, Any]
    exactness: Recorded | None
    comparison: Comparison | None

    @property
    def exact_words(self) -> Iterator[str]:
        """The sentences on exact resume."""
        if self.exactness is None:
            yield "not known: no start has recorded it"
        elif not self.exactness.seen:
            yield f"exact, as far as {self.exactness.by} has seen its loaders and state"
        else:
            yield from map(sentence, self.exactness.seen)


def read_content(path: Path, runs: int = 1) -> RunContent:
    """Reads what a report says of a run; `runs`: how many share the page."""
    events = timed_events(path)
    went = goodput(path)
    starts = path / "starts"
    last = max((int(one.name) for one in starts.glob("*") if one.name.isdecimal()), default=0)
    measured = next((start.ranks for start in reversed(went.starts) if list(step_findings(start.ranks))), ())
    now = time.time()
    run, interval = state(path, now=now), interval_finding(path, went)
    findings = [*_hangs(run, now), *step_findings(measured), *([interval] if interval is not None else [])]
    return RunContent(
        run=run,
        goodput=went,
        moments=[*_moments(events), *_kills(run, went)],
        curves=read_curves(path / "metrics.csv", runs),
        clock=Clock(_marks(path, events, went)),
        findings=findings,
        settings=_json(starts / str(last) / "resolution.json"),
        provenance=_json(starts / str(last) / "provenance.json"),
        exactness=last_record(path),
        comparison=compare(path, went),
    )


def _hangs(run: RunState, now: float) -> Iterator[Finding]:
    """That a run which has not ended does not get on."""
    stuck = find_stuck(run, now)
    if stuck is not None:
        text = stuck_line(stuck, now, running=run.state == "running")
        yield Finding("error", "hang", text, fix=f"fairlead doctor --run {run.name}: where they stand, and what to do")


def _kills(run: RunState, went: Goodput) -> Iterator[Moment]:
    """The unreported ends."""
    for start in went.starts:
        if not start.end and not (run.state == "running" and start is went.starts[-1]):
            yield Moment(start.ended, "killed", start.number, start.last_step, "its last sign of life")


def _marks(path: Path, events: Sequence[Mapping[str, Any]], went: Goodput) -> Iterator[tuple[int, float]]:
    for event in events:
        if event["event"] in ("training", "checkpoint", "finished", "stop") and isinstance(event.get("step"), int):
            yield event["step"], event_time(event)
    for start in went.starts:
        for period in read_series(path, start.number):
            yield period.step, period.time


def _moments(events: Sequence[Mapping[str, Any]]) -> list[Moment]:
    """Of very many checkpoints every second, third, ... is shown."""
    saves = sum(event["event"] == "checkpoint" for event in events)
    every = max(1, saves // (_MOST_EVENTS // 2))
    found: list[Moment] = []
    seen = 0
    for event in events:
        kind = _SHOWN.get(event["event"])
        if kind is None:
            continue
        if kind == "checkpoint":
            seen += 1
            if (seen - 1) % every:
                continue
        step = event.get("step")
        found.append(
            Moment(
                event_time(event),
                kind,
                int(event.get("start", 0)),
                step if isinstance(step, int) else None,
                _text(event),
            )
        )
    return found[-_MOST_EVENTS:]


def _text(event: Mapping[str, Any]) -> str:
    words = [str(event[name]) for name in _TEXTS if event.get(name)]
    if event["event"] == "start":
        words += [f"{event.get('world_size')} ranks"] if event.get("world_size") else []
        words += ["resumed"] if event.get("resumed_from") else []
    if event["event"] == "checkpoint" and "seconds" in event:
        words.append(f"{event['seconds']} s")
    return "; ".join(words)[:300]


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}  # of a start that was killed before it was written, or of none
    return found if isinstance(found, dict) else {}
