"""`fairlead status`: what a run is doing, and which rank is stuck where."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from fairlead.cli.session import Session
from fairlead_runs import Beat, RunState, state
from fairlead_runs.commands.texts import ago, facts, find_run, headline, in_words, shown_state, summary, table
from fairlead_runs.describe import counted
from fairlead_runs.monitoring import scraped_at
from fairlead_runs.pace import pace
from fairlead_runs.scheduler import ask_for_job, job_of_run
from fairlead_runs.states import find_dumps
from fairlead_runs.waiting import Waiting, grouped, rank_ranges, ranks_text, waiting

_ROWS: Final = 20
"""Groups of ranks that are shown: a job of any size fits on a screen."""


def status_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead status`."""
    parser.add_argument("run", metavar="RUN", help="a run directory, or the name of one in runs/")
    parser.add_argument("--json", action="store_true", help="print one JSON document, with every rank")


def run_status(arguments: argparse.Namespace, session: Session) -> int:
    """Shows one run: its state, why, its job, its pace, where the ranks are, and for which of them the others wait."""
    now = time.time()
    run = state(find_run(arguments.run, session), now=now)
    stuck = find_stuck(run, now)
    job = job_of_run(run.path) if run.state != "finished" else None
    answer = ask_for_job(job, session.plugins, session.environ) if job is not None else None
    how = pace(run, now)
    dumps = find_dumps(run.path)
    if arguments.json:
        behind = [beat.rank for beat in stuck.behind] if stuck is not None else []
        named = set(behind)
        session.print_json(
            {
                **summary(run),
                **dict(zip(("state", "reason"), shown_state(run, job, answer), strict=True)),
                **asdict(how),
                "job": {"id": job, **(asdict(answer) if answer is not None else {})} if job is not None else None,
                "ranks": [{**_rank(beat, now), "behind": beat.rank in named} for beat in run.ranks],
                "behind": behind,
                "why_behind": stuck.why if stuck is not None else None,
                "scraped_at": scraped_at(run.path),
                "dumps": [{"kind": d.kind, "path": str(d.path), "files": d.files} for d in dumps],
            }
        )
        return 0
    session.print(headline(run, job, answer))
    for name, value in facts(run, how, job, answer, now).items():
        session.print(f"  {name + ':':<11}{value}")
    if run.ranks:
        session.print()
        for line in _groups(grouped(run.ranks), now):
            session.print(line)
    notes: list[str] = []
    if stuck is not None:
        notes.append(stuck_line(stuck, now, running=run.state == "running"))
    notes += [f"{d.kind}: {_shown(d.path, session)} ({counted(d.files, 'file')})" for d in dumps]
    if notes:
        session.print()
        for note in notes:
            session.print(note)
    return 0


def find_stuck(run: RunState, now: float) -> Waiting | None:
    """Which ranks of a run the others wait for, or waited for when it ended without an error report."""
    if run.state == "running":
        return waiting(run.ranks, now)
    # A job that hung until its time was over ends without a word; its last heartbeats still say who hung.
    return waiting(run.ranks, None) if run.state == "interrupted" else None


def _groups(groups: Sequence[Sequence[Beat]], now: float) -> Iterator[str]:
    rows = [("ranks", "on", "step", "phase", "last heartbeat", "stands in")]
    for group in groups[:_ROWS]:
        first = group[0]
        rows.append(
            (
                rank_ranges(beat.rank for beat in group),
                _hosts(group),
                str(first.step),
                first.phase,
                ago(now - max(beat.time for beat in group)),
                first.location or "-",
            )
        )
    yield from table(rows)
    left = groups[_ROWS:]
    if left:
        ranks = counted(sum(len(group) for group in left), "rank")
        yield f"and {ranks} in {counted(len(left), 'more group')}; --json has each"


def stuck_line(stuck: Waiting, now: float, *, running: bool) -> str:
    """Which rank is stuck where, and who waits for it, as a sentence."""
    first = stuck.behind[0]
    since = f" since {in_words(now - max(beat.time for beat in stuck.behind))}" if running else ""
    where = f", in {first.location}" if first.location and len({beat.location for beat in stuck.behind}) == 1 else ""
    who = f"{ranks_text(beat.rank for beat in stuck.behind)} ({_hosts(stuck.behind)})"
    steps = sorted({beat.step for beat in stuck.others})
    if stuck.why == "silent":
        others = f"alive at step {first.step}"
    elif stuck.why == "elsewhere":
        others = f"waiting at step {first.step} at another line of code"
    elif steps == [first.step]:
        others = f"further: {', '.join(sorted({beat.phase for beat in stuck.others}))}"
    else:
        others = f"at step {rank_ranges(steps)}" + (", waiting" if all(beat.location for beat in stuck.others) else "")
    before = "" if running else "when the run ended, "
    stands = f"{before}{who}: at step {first.step} in {first.phase}{since}{where}"
    return f"{stands}; {counted(len(stuck.others), 'other')}: {others}"


def _hosts(beats: Sequence[Beat]) -> str:
    names = sorted({beat.host or f"node {beat.node}" for beat in beats})
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} nodes"


def _rank(beat: Beat, now: float) -> dict[str, Any]:
    return {
        "rank": beat.rank,
        "node": beat.node,
        "local_rank": beat.local_rank,
        "host": beat.host or None,
        "phase": beat.phase,
        "step": beat.step,
        "turn": beat.turn,
        "location": beat.location or None,
        "age_s": max(0.0, now - beat.time),
    }


def _shown(path: Path, session: Session) -> str:
    return str(path.relative_to(session.cwd)) if path.is_relative_to(session.cwd) else str(path)
