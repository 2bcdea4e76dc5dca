"""`fairlead runs` and `fairlead status`: what runs there are, what they are doing, and which rank is behind."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fairlead import yaml
from fairlead.cli.session import Session
from fairlead.errors import ConfigError, did_you_mean
from fairlead.run import Beat, RunState, is_run, list_runs, state

__all__ = ["run_runs", "run_status", "runs_arguments", "status_arguments"]

_STUCK_AFTER_S = 60.0
"""A rank without a sign of life for so long, and so much longer than the others, is named as stuck."""


def runs_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead runs`."""
    parser.usage = "fairlead runs [DIR] [--json]\n       fairlead runs diff A B [--json]"
    parser.add_argument(
        "words",
        metavar="DIR",
        nargs="*",
        default=["runs"],
        help="the folder with the run directories (default: runs); or `diff A B`: what two runs' settings differ in",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def status_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fairlead status`."""
    parser.add_argument("run", metavar="RUN", help="a run directory, or the name of one in runs/")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run_runs(arguments: argparse.Namespace, session: Session) -> int:
    """Lists the runs of a folder, or compares two."""
    words: list[str] = arguments.words
    if words[0] == "diff" and not (len(words) == 1 and (session.cwd / "diff").is_dir()):
        if len(words) != 3:
            raise ConfigError("diff compares two runs", where="fairlead runs", fix="write: fairlead runs diff A B")
        return _diff(words[1], words[2], session, as_json=arguments.json)
    if len(words) > 1:
        raise ConfigError(f"unexpected words: {' '.join(words[1:])}", where="fairlead runs", fix="name one folder")
    found = list_runs(session.cwd / words[0])
    if arguments.json:
        session.print_json([_summary(run) for run in found])
        return 0
    if not found:
        session.print(f"no runs in {words[0]}")
        return 0
    header = ("name", "state", "step", "metric", "starts", "last heartbeat")
    rows = [
        (r.name, r.state, _or_dash(r.step), _metric(r.metrics), str(r.starts), _ago(r.heartbeat_age_s)) for r in found
    ]
    for line in _table([header, *rows]):
        session.print(line)
    return 0


def run_status(arguments: argparse.Namespace, session: Session) -> int:
    """Shows one run: its state, why, and where each rank is."""
    path = _find(arguments.run, session)
    now = time.time()
    run = state(path, now=now)
    behind = _behind(run, now)
    if arguments.json:
        ranks = [{**_rank(beat, now), "behind": beat in behind} for beat in run.ranks]
        session.print_json({**_summary(run), "ranks": ranks, "behind": [beat.rank for beat in behind]})
        return 0
    session.print(f"{run.name}: {run.state}" + (f" ({run.reason})" if run.reason else ""))
    facts = {
        "directory": str(run.path),
        "starts": str(run.starts),
        "step": _or_dash(run.step),
        "metrics": _metric(run.metrics),
    }
    if run.owner is not None:
        facts["held by"] = f"{run.owner.host}, process {run.owner.pid}"
    for name, value in facts.items():
        session.print(f"  {name + ':':<11}{value}")
    if run.ranks:
        session.print()
        rows = [(f"{b.rank}", f"{b.node}", b.phase, f"{b.step}", _ago(now - b.time)) for b in run.ranks]
        for line in _table([("rank", "node", "phase", "step", "last heartbeat"), *rows]):
            session.print(line)
    for beat in behind:
        session.print(
            f"rank {beat.rank} on node {beat.node} is behind: {beat.phase}, step {beat.step}, {_ago(now - beat.time)}"
        )
    return 0


def _behind(run: RunState, now: float) -> list[Beat]:
    """The ranks that the others wait for: at the lowest step, or silent while the others are not.

    In a collective every rank waits for the slowest one, so the lowest step points at it; where all
    have the same step, it is the one whose last sign of life is the oldest.
    """
    if run.state != "running" or len(run.ranks) < 2:
        return []
    lowest = min(beat.step for beat in run.ranks)
    if lowest < max(beat.step for beat in run.ranks):
        return [beat for beat in run.ranks if beat.step == lowest]
    newest = max(beat.time for beat in run.ranks)
    silent = [beat for beat in run.ranks if now - beat.time > _STUCK_AFTER_S and newest - beat.time > _STUCK_AFTER_S]
    return sorted(silent, key=lambda beat: beat.time)


def _find(name: str, session: Session) -> Path:
    for path in (session.cwd / name, session.cwd / "runs" / name):
        if is_run(path):
            return path
    folder = session.cwd / "runs"
    known = [run.name for run in list_runs(folder)] if folder.is_dir() else []
    near = did_you_mean(name, known)
    raise ConfigError(
        f"there is no run {name!r}",
        where="RUN",
        why=f"looked for {session.cwd / name} and {folder / name}",
        fix=f"did you mean {near!r}?" if near else "`fairlead runs DIR` lists the runs of a folder",
    )


def _diff(first: str, second: str, session: Session, *, as_json: bool) -> int:
    """The settings in which two runs' jobs differ."""
    a, b = (dict(_flat(_job(_find(name, session)))) for name in (first, second))
    different = [name for name in sorted(a.keys() | b.keys()) if a.get(name, ...) != b.get(name, ...)]
    if as_json:
        session.print_json({name: {"a": a.get(name), "b": b.get(name)} for name in different})
        return 0
    if not different:
        session.print(f"{first} and {second} have the same settings")
        return 0
    rows = [(name, *(_shown(side[name]) if name in side else "-" for side in (a, b))) for name in different]
    for line in _table([("setting", first, second), *rows]):
        session.print(line)
    return 0


def _job(path: Path) -> Any:
    return yaml.load_file(path / "job.yaml").data


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every single setting by its path; an empty mapping or list is one too."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _flat(item, f"{path}[{index}]")
    else:
        yield path, value


def _summary(run: RunState) -> dict[str, Any]:
    return {
        "name": run.name,
        "path": str(run.path),
        "state": run.state,
        "reason": run.reason,
        "step": run.step,
        "metrics": dict(run.metrics),
        "starts": run.starts,
        "started": run.started.isoformat() if run.started else None,
        "heartbeat_age_s": run.heartbeat_age_s,
    }


def _rank(beat: Beat, now: float) -> dict[str, Any]:
    return {
        "rank": beat.rank,
        "node": beat.node,
        "local_rank": beat.local_rank,
        "phase": beat.phase,
        "step": beat.step,
        "age_s": max(0.0, now - beat.time),
    }


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _shown(value: Any) -> str:
    return yaml.dump(value).removesuffix("\n").removesuffix("\n...")


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _metric(metrics: Mapping[str, Any]) -> str:
    """The metric that a run is judged by: a validation loss if there is one, else the first."""
    name = next((n for n in ("val/loss", "val_loss") if n in metrics), next(iter(metrics), None))
    if name is None:
        return "-"
    value = metrics[name]
    return f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{max(0, int(seconds))} s ago"
