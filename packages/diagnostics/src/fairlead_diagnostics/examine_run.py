"""`fairlead doctor --run RUN`: why a run crawls, hangs or has ended, from its directory.

A rank that stands still dumps its stacks on request, by a file that it looks for only then: one whose steps advance
is not disturbed.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from fairlead.cli.session import Session
from fairlead.findings import Finding
from fairlead_runs import Beat, RunState, state
from fairlead_runs.checkpoint_interval import interval_finding
from fairlead_runs.commands.status import find_stuck, stuck_line
from fairlead_runs.commands.texts import ago, headline, in_words, table
from fairlead_runs.commit import newest_complete
from fairlead_runs.describe import counted, duration
from fairlead_runs.goodput import LOST, SAVING, goodput
from fairlead_runs.heartbeat import read_heartbeats
from fairlead_runs.pace import pace
from fairlead_runs.states import REQUESTED, dump_folder, stacks_request
from fairlead_runs.step_findings import step_findings
from fairlead_runs.step_times import RankTimes, read_times
from fairlead_runs.waiting import Waiting, grouped, rank_ranges, waiting

_WATCHED_S: Final = 3.0
"""Seconds between two looks at the heartbeats: a rank writes one a second."""
_ANSWER_S: Final = 4.0
_STILL_S: Final = 20.0
"""A rank without a sign of life for so long stands still, or its node is gone."""
_LARGE: Final = 0.15
_COUNTS_S: Final = 60.0
"""Seconds of a run of which shares say something."""
_FRAME: Final = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
_BACKWARD: Final = "backward pass"
"""Where DDP averages gradients, in code that has no frames of Python."""
_COLLECTIVES: Final = ("distributed_c10d.py", "collectives.py", "_functional_collectives.py")
_OURS: Final = re.compile(r"/(site-packages|dist-packages|lib/python3|s?bin|src/fairlead\w*)(/|\.|$)|<frozen ")
"""Files that are not the user's own: what is installed, Python's library, the commands, and Fairlead in a clone."""

ROWS: Final[Mapping[str, str]] = {
    "hang": "a collective times out in training",
    "different-calls": "ranks of a custom training loop wait for each other in different collectives",
    "data-wait": "the training waits for data",
    "communication-wait": "slower than on one node",
    "slow-rank": "one rank is slower than the others",
    "logging-slow": "the device waits between two steps",
    "saving-slow": "saving takes a large part of the time",
    "lost-work": "failures cost a large part of the time",
    "checkpoint-interval": "failures cost a large part of the time",
    "not-running": "it ended, and nobody knows why",
    "failed": "the job's own code failed",
    "no-steps": "ranks do not arrive",
}
"""The row of the page "Troubleshooting" for each thing that is found, by its symptom."""


@dataclass(frozen=True)
class Diagnosis:
    """One thing that is wrong with a run.

    Attributes:
        code: One of `ROWS`.
        what: The evidence.
        do: The next step.
        serious: Whether the run does not get on at all.
    """

    code: str
    what: str
    why: str
    do: str
    serious: bool = False

    @property
    def row(self) -> str:
        """The symptom in the page "Troubleshooting"."""
        return ROWS[self.code]


@dataclass(frozen=True)
class Standing:
    """Where a rank that stands still is, by its stacks.

    Attributes:
        collective: The collective that it is in, as `all_reduce`; None: in none.
        place: The innermost line of the user's code, or of any, as `train.py:12, in step`.
    """

    rank: int
    collective: str | None
    place: str


def examine_run(path: Path, arguments: argparse.Namespace, session: Session) -> int:
    """Says what is wrong with a run; returns 1 if it does not get on at all."""
    before = {beat.rank: beat for beat in read_heartbeats(path / "heartbeats")}
    run = state(path)
    if run.state == "running":
        time.sleep(_WATCHED_S)
    now = time.time()
    run = state(path, now=now)
    standing = _ask(run, now) if run.state == "running" else []
    if run.state == "interrupted":  # what it has left when nothing moved
        standing = list(_read_stacks(run, run.starts))
    ranks = read_times(path, max((beat.start for beat in run.ranks), default=run.starts))
    found = list(_diagnoses(run, ranks, standing, before, now))
    if arguments.json:
        session.print_json(
            {
                "run": str(path),
                "state": run.state,
                "advances": _advances(run, before),
                "found": [{**asdict(one), "row": one.row} for one in found],
                "standing": [asdict(one) for one in standing],
                "shares": {one.rank: one.shares for one in ranks if one.mean_s},
            }
        )
    else:
        for line in _lines(run, ranks, standing, found, before, now):
            session.print(line)
    return 1 if any(one.serious for one in found) else 0


def _advances(run: RunState, before: Mapping[int, Beat]) -> bool:
    """Whether a step or phase of any rank has changed since the first look."""
    return any(
        (old := before.get(beat.rank)) is None or (old.step, old.turn, old.phase) != (beat.step, beat.turn, beat.phase)
        for beat in run.ranks
    )


# -- what is wrong


def _diagnoses(
    run: RunState, ranks: Sequence[RankTimes], standing: Sequence[Standing], before: Mapping[int, Beat], now: float
) -> Iterator[Diagnosis]:
    if run.state in ("failed", "interrupted"):
        newest = newest_complete(run.path / "checkpoints").checkpoint
        resumes = f"resumes from step {newest.step}" if newest is not None else "begins anew: it has no checkpoint yet"
        yield Diagnosis(
            "failed" if run.state == "failed" else "not-running",
            f"the run is not running: {run.state}" + (f", {run.reason}" if run.reason else ""),
            f"its last sign of life was {ago(run.heartbeat_age_s)}",
            f"fairlead logs {run.path}; started again, it {resumes}",
            serious=True,
        )
    stuck = find_stuck(run, now)
    if stuck is None and standing and not _advances(run, before):  # all stand still: their lines say who is behind
        stuck = waiting(run.ranks, None)
    calls = {one.collective for one in standing if one.collective not in (None, _BACKWARD)}
    if len(calls) > 1:
        yield _different_calls(standing)
    elif stuck is not None:
        yield _hang(run, stuck, standing, now)
    elif run.state == "running" and run.ranks and not _advances(run, before):
        oldest = now - max(beat.time for beat in run.ranks)
        if oldest > _STILL_S:
            yield _all_still(run, standing, oldest)
    missing = _missing(run)
    if missing is not None:
        yield missing
    for finding in step_findings(ranks):
        yield _of_finding(finding)
    yield from _costs(run)


def _hang(run: RunState, stuck: Waiting, standing: Sequence[Standing], now: float) -> Diagnosis:
    behind = {beat.rank for beat in stuck.behind}
    where = [one for one in standing if one.rank in behind]
    others = [one for one in standing if one.rank not in behind]
    waits = sorted({one.collective or f"{one.place}" for one in others})
    why = "; ".join(f"rank {one.rank} is at {one.place}" for one in where[:4]) or "its stacks did not come"
    if waits:
        why += f"; the others wait in {', '.join(waits[:3])}"
    return Diagnosis(
        "hang",
        stuck_line(stuck, now, running=run.state == "running"),
        why,
        "look at that line: another branch, a caught exception, a lock, a slow file; the stacks of all ranks are in "
        f"{dump_folder(run.path, 'stacks', run.starts)}",
        serious=True,
    )


def _different_calls(standing: Sequence[Standing]) -> Diagnosis:
    by_call: dict[str, list[Standing]] = {}
    for one in standing:
        if one.collective is not None:
            by_call.setdefault(one.collective, []).append(one)
    parts = [
        f"rank{'s' if len(ones) > 1 else ''} {rank_ranges(one.rank for one in ones)} in {call} ({ones[0].place})"
        for call, ones in sorted(by_call.items())
    ]
    return Diagnosis(
        "different-calls",
        f"the ranks wait for each other in different collectives: {'; '.join(parts)}",
        "each waits for all others to call the same",
        "look for an `if rank == 0`, or a loop that one rank leaves earlier; "
        "FAIRLEAD_CHECK_COLLECTIVES=all names it at once",
        serious=True,
    )


def _all_still(run: RunState, standing: Sequence[Standing], since: float) -> Diagnosis:
    places = sorted({one.place for one in standing}) or sorted({beat.location for beat in run.ranks if beat.location})
    who = "no rank has" if len(run.ranks) > 1 else "it has not"
    return Diagnosis(
        "hang",
        f"{who} given a sign of life for {in_words(since)}, in {run.ranks[0].phase} at step {run.ranks[0].step}",
        f"all stand at {', '.join(places[:3])}" if places else "their stacks did not come: their nodes may be gone",
        "a long validation or save is well; else look at that line, and at the nodes",
        serious=True,
    )


def _missing(run: RunState) -> Diagnosis | None:
    """A start that has not come to its training, and of which ranks are absent."""
    if run.state != "running" or not run.ranks or run.ranks[0].phase not in ("setup", "prepare"):
        return None
    waits = run.heartbeat_age_s or 0.0
    if waits < _STILL_S:
        return None
    return Diagnosis(
        "no-steps",
        f"{counted(len(run.ranks), 'rank')} stand in {run.ranks[0].phase} for {in_words(waits)}",
        "they wait for others to arrive, or prepare data",
        "the start ends after `preflight_timeout` and names who is missing; prepare data before the job",
    )


def _of_finding(finding: Finding) -> Diagnosis:
    return Diagnosis(finding.code, finding.what, finding.why or "", finding.fix or "")


def _costs(run: RunState) -> Iterator[Diagnosis]:
    went = goodput(run.path)
    total = went.total_s
    if total < _COUNTS_S:
        return
    if (interval := interval_finding(run.path, went)) is not None:
        yield _of_finding(interval)
    saving, lost = went.seconds.get(SAVING, 0.0), went.seconds.get(LOST, 0.0)
    if saving > _LARGE * total:
        yield Diagnosis(
            "saving-slow",
            f"saving takes {saving / total:.0%} of the time: {in_words(saving)} of {in_words(total)}",
            "the training waits while a checkpoint is written",
            "checkpoint_io: async; or save less often (trainer.checkpoint.every_n_steps)",
        )
    if lost > _LARGE * total:
        yield Diagnosis(
            "lost-work",
            f"{lost / total:.0%} of the time was lost to failures: {in_words(lost)} of {in_words(total)}",
            f"{len(went.starts)} starts; what was done after the last checkpoint is repeated",
            "save more often (trainer.checkpoint.every_n_minutes); find the node that fails: fairlead report",
        )


# -- where the ranks stand


def _ask(run: RunState, now: float) -> list[Standing]:
    """Has all ranks that stand still dump their stacks, and reads what came; the others are left alone."""
    still = [beat for beat in run.ranks if beat.location]
    if not still:
        return []
    request = stacks_request(run.path)
    try:
        request.touch()
    except OSError:
        return []  # another user's run: it can be read, and takes no requests
    start = max(beat.start for beat in still)
    try:
        until = time.monotonic() + _ANSWER_S
        while time.monotonic() < until:
            found = list(_read_stacks(run, start, since=now))
            if len(found) == len(still):
                break
            time.sleep(0.25)
        return found
    finally:
        with suppress(FileNotFoundError):  # two doctors at once
            request.unlink()


def _read_stacks(run: RunState, start: int, since: float = 0.0) -> Iterator[Standing]:
    """The last dump of each rank of a start; `since`: written after that."""
    for file in sorted(dump_folder(run.path, "stacks", start).glob("rank-*.txt")):
        rank = file.stem.removeprefix("rank-")
        try:
            written, text = file.stat().st_mtime, file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if rank.isdecimal() and written >= since - 1 and (not since or REQUESTED in text):
            yield _standing(int(rank), text.rpartition("\n== ")[2])


def _standing(rank: int, dump: str) -> Standing:
    """The main thread of a dump, which faulthandler writes last, innermost frame first."""
    frames = [match for line in dump.rpartition("\nThread ")[2].splitlines() if (match := _FRAME.match(line))]
    named = [one["function"] for one in frames if Path(one["file"]).name in _COLLECTIVES]
    collective = next((name for name in named if name not in ("wrapper", "wrapped")), None)
    if collective is None and any(one["function"] == "_engine_run_backward" for one in frames):
        collective = _BACKWARD
    own = next((one for one in frames if not _OURS.search(one["file"])), frames[0] if frames else None)
    place = f"{Path(own['file']).name}:{own['line']}, in {own['function']}" if own is not None else "an unknown line"
    return Standing(rank, collective, place)


# -- in words


def _lines(
    run: RunState,
    ranks: Sequence[RankTimes],
    standing: Sequence[Standing],
    found: Sequence[Diagnosis],
    before: Mapping[int, Beat],
    now: float,
) -> Iterator[str]:
    yield headline(run, None, None)
    how = pace(run, now)
    if run.state == "running":
        speed = f"{how.steps_per_s:.3g} steps/s" if how.steps_per_s else ""
        if _advances(run, before):
            moves = f"its steps advance{' at ' * bool(speed)}{speed}"
        else:
            moves = f"no step has ended in the last seconds{'; before that ' * bool(speed)}{speed}"
        yield f"  step {run.step if run.step is not None else '-'}: {moves}"
    known = [one for one in ranks if one.mean_s]
    if known:
        shares = sorted(known[0].shares.items(), key=lambda pair: -pair[1])
        yield f"  a step of rank {known[0].rank}: {duration(known[0].mean_s or 0.0)}; " + ", ".join(
            f"{part} {share:.0%}" for part, share in shares if share >= 0.005
        )
    if run.ranks:
        yield ""
        places = {one.rank: one for one in standing}
        rows = [("ranks", "step", "phase", "last heartbeat", "stands in", "collective")]
        for group in grouped(run.ranks)[:20]:
            first, at = group[0], places.get(group[0].rank)
            rows.append(
                (
                    rank_ranges(beat.rank for beat in group),
                    str(first.step),
                    first.phase,
                    ago(now - max(beat.time for beat in group)),
                    at.place if at is not None else (run.state == "running" and first.location) or "-",
                    (at.collective if at is not None else None) or "-",
                )
            )
        yield from table(rows)
    yield ""
    if not found:
        yield "nothing stands out" if run.state == "running" else f"nothing is wrong with it: {run.state}"
    for one in found:
        yield f"{'error' if one.serious else 'warning'}[{one.code}]: {one.what}"
        yield f"  why:   {one.why}"
        yield f"  do:    {one.do}"
        yield f"  more:  the page Troubleshooting, “{one.row}”"
