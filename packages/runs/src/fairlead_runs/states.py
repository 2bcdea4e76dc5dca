"""What a run is doing, from what its directory holds; reads only, and copes with folders that are no runs."""

from __future__ import annotations

import datetime
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from fairlead.errors import FairleadError, RunDirectoryError
from fairlead_runs.commit import LockOwner, list_checkpoints, read_lock
from fairlead_runs.heartbeat import Beat, read_heartbeats
from fairlead_runs.history import read_history
from fairlead_runs.submitted import was_submitted

FINGERPRINT_FILE = "fingerprint.json"
HISTORY_FILE = "history.jsonl"
LOCK_FILE = ".lock"
PLAN_FILE = "plan.json"
"""What `fairlead plan --write` has predicted of the run."""

State = Literal["running", "finished", "failed", "stopped", "interrupted", "unknown"]
_ENDS: Mapping[str, State] = {"finished": "finished", "failed": "failed", "stop": "stopped"}
_CLOCK_SLACK_S = 5.0
DumpKind = Literal["stacks", "flight-recorder"]
_DUMPS: Final[tuple[DumpKind, ...]] = ("stacks", "flight-recorder")


@dataclass(frozen=True)
class Best:
    """The best value of the metric that a run monitors, and the step of it; `mode` says what is best."""

    metric: str
    value: float
    step: int | None
    mode: str

    @property
    def rank(self) -> float:
        """Sorts the better one first."""
        return self.value if self.mode == "min" else -self.value

    def __str__(self) -> str:
        return f"{self.metric}={self.value:.4g}" + (f" at {self.step}" if self.step is not None else "")


@dataclass(frozen=True)
class RunState:
    """A run at a glance; the step, the metrics and the beats are the last ones known.

    Attributes:
        state: `running`; `finished`; `failed` (its code raised, a rank died); `stopped` (on a signal,
            everything saved); `interrupted` (it exited without an error report: killed, or its node died); `unknown`
            (never started, or not readable).
        reason: Why, in a few words; may be empty.
        starts: How often it was started, the last time at `started`, UTC.
        best: The best value of the monitored metric in any checkpoint, also one that retention has deleted.
        heartbeat_age_s: Seconds since the last sign of life of any rank, or None.
        owner: Who holds its lock now, or None.
    """

    path: Path
    state: State
    reason: str = ""
    step: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    best: Best | None = None
    starts: int = 0
    started: datetime.datetime | None = None
    heartbeat_age_s: float | None = None
    owner: LockOwner | None = None
    ranks: Sequence[Beat] = ()

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.name


@dataclass(frozen=True)
class Dumps:
    """A folder of `stacks` or of a `flight-recorder`, with how many files it and its subfolders hold."""

    kind: str
    path: Path
    files: int


def is_run(path: Path) -> bool:
    """Whether this folder is a run directory, also of a run that was only submitted so far."""
    return (path / FINGERPRINT_FILE).is_file() or was_submitted(path)


def list_runs(directory: Path, *, now: float | None = None) -> list[RunState]:
    """The state of every run in a folder (or of the run that it is), by name; other folders are passed over."""
    if is_run(directory):
        return [state(directory, now=now)]
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise RunDirectoryError("cannot list runs", where=str(directory), why=error.strerror) from error
    return [state(directory / name, now=now) for name in names if is_run(directory / name)]


def state(path: Path, *, now: float | None = None) -> RunState:
    """The state of one run.  Never raises for what is in it: what cannot be read is `unknown`, with the reason."""
    try:
        return _state(path, time.time() if now is None else now)
    except (FairleadError, OSError) as error:
        return RunState(path, "unknown", getattr(error, "why", None) or str(error))


def dump_folder(run: Path, kind: DumpKind, start: int) -> Path:
    """Where the stacks of a start (`rank-00003.txt`) or torch's flight recorders (`gloo/rank_3`) go."""
    return run / kind / f"start-{start}"


REQUESTED: Final = "requested by fairlead doctor"
"""What the first line of stacks says that were dumped on request."""


def stacks_request(run: Path) -> Path:
    """The file that requests the stacks of all ranks that stand still; whoever makes it removes it."""
    return run / "heartbeats" / "SHOW-STACKS"


def find_dumps(run: Path) -> list[Dumps]:
    """What the last start that failed or hung has left."""
    folders = [folder for kind in _DUMPS for folder in (run / kind).glob("start-*")]
    numbers = [int(number) for folder in folders if (number := folder.name.removeprefix("start-")).isdecimal()]
    if not numbers:
        return []
    last = [(kind, dump_folder(run, kind, max(numbers))) for kind in _DUMPS]
    counted = [Dumps(kind, path, sum(len(files) for _, _, files in os.walk(path))) for kind, path in last]
    return [dumps for dumps in counted if dumps.files]


def _state(path: Path, now: float) -> RunState:
    events = read_history(path / HISTORY_FILE)
    starts = [index for index, event in enumerate(events) if event["event"] == "start"]
    since = events[starts[-1] :] if starts else []
    started = _when(since[0]) if since else None
    earliest = started.timestamp() - _CLOCK_SLACK_S if started else float("inf")
    number = since[0].get("start") if since else None
    # Records of ranks that only an earlier start had stay in the files; they are not of this start.
    ranks = [
        beat
        for beat in read_heartbeats(path / "heartbeats")
        if (beat.start == number if beat.start else beat.time >= earliest)
    ]
    last_beat = max((beat.time for beat in ranks), default=None)
    lock = read_lock(path / LOCK_FILE)
    living = lock if lock is not None and lock.gone is None else None
    signs = [] if last_beat is None else [max(0.0, now - last_beat)]
    if living is not None:
        signs.append(living.age_s)
    kind, reason = _kind(since, living is not None, lock.gone if lock else None)
    return RunState(
        path=path,
        state=kind,
        reason=reason,
        step=_step(events, ranks),
        metrics=next((e["metrics"] for e in reversed(events) if isinstance(e.get("metrics"), dict)), {}),
        best=_best(path, events),
        starts=len(starts),
        started=started,
        heartbeat_age_s=min(signs, default=None),
        owner=living.owner if living else None,
        ranks=ranks,
    )


def _kind(since: Sequence[Mapping[str, Any]], locked: bool, gone: str | None) -> tuple[State, str]:
    end = next((event for event in reversed(since) if event["event"] in _ENDS), None)
    if end is not None and end["event"] == "failed":
        first = next(event for event in since if event["event"] == "failed")
        if first.get("reason"):
            return "failed", str(first["reason"])
        error = " ".join(str(first.get("error", "")).split())[:200]
        return "failed", error if error.startswith("rank") else f"rank {first.get('rank')}: {error}"
    if end is not None:
        return _ENDS[end["event"]], str(end.get("reason") or "")
    if locked:
        return "running", "" if since else "starting"
    if not since:
        return "unknown", "it was never started"
    return "interrupted", gone or "it exited without an error report: killed, or its node died"


def _best(path: Path, events: Sequence[Mapping[str, Any]]) -> Best | None:
    """The newest checkpoint says what is monitored, the history what came of it."""
    saved = list_checkpoints(path / "checkpoints")
    metadata = saved[-1].metadata if saved else {}
    metric, mode = metadata.get("monitor"), str(metadata.get("mode", "min"))
    found = [
        (float(value), event.get("step"))
        for event in events
        if event["event"] == "checkpoint" and isinstance(value := (event.get("metrics") or {}).get(metric), int | float)
        if not math.isnan(value)
    ]
    if not isinstance(metric, str) or not found:
        return None
    value, step = (min if mode == "min" else max)(found, key=lambda pair: pair[0])
    return Best(metric, value, step, mode)


def _step(events: Sequence[Mapping[str, Any]], ranks: Sequence[Beat]) -> int | None:
    if ranks:
        return max(beat.step for beat in ranks)
    return next((event["step"] for event in reversed(events) if isinstance(event.get("step"), int)), None)


def _when(event: Mapping[str, Any]) -> datetime.datetime | None:
    try:
        return datetime.datetime.fromisoformat(str(event.get("time")))
    except ValueError:
        return None
