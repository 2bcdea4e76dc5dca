"""What the commands about runs share: finding a run, and how its facts are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fairlead.cli.session import Session
from fairlead.errors import ConfigError, did_you_mean
from fairlead_runs import RunState, is_run, list_runs
from fairlead_runs.describe import counted, shown_path
from fairlead_runs.states import FINGERPRINT_FILE
from fairlead_runs.submitted import LOCAL, read_submission


def find_run(name: str, session: Session, *, or_sweep: bool = False) -> Path:
    """A run directory, or the name of one in `runs/`; `ConfigError` where there is none.

    `or_sweep`: or what the members of a sweep share, which a scheduler has as one job.
    """
    places = list(dict.fromkeys((session.cwd / name, session.cwd / "runs" / name)))  # an absolute path is one place
    for path in places:
        try:
            if is_run(path):
                next(path.iterdir())
                return path
        except PermissionError as error:
            raise ConfigError(
                "you may not read this run",
                where=str(path),
                why=f"it belongs to {_owner(path)}: {error.strerror}",
                fix="ask its owner to let you read it: chmod -R g+rX",
            ) from error
        record = read_submission(path)
        if record is not None and record.index is not None:
            if or_sweep and record.to != LOCAL:
                return path
            raise ConfigError(
                f"{name} is a sweep of {counted(len(record.runs), 'run')}",
                where="RUN",
                why=f"from {Path(record.runs[0]).name} to {Path(record.runs[-1]).name}",
                fix=f"name one of them; fairlead runs {shown_path(path, session.cwd)} lists them",
            )
    folder = session.cwd / "runs"
    known = [run.name for run in list_runs(folder)] if folder.is_dir() else []
    near = did_you_mean(name, known)
    raise ConfigError(
        f"there is no run {name!r}",
        where="RUN",
        why="; ".join(_why_no_run(path) for path in places),
        fix=f"did you mean {near!r}?" if near else "`fairlead runs DIR` lists the runs of a folder",
    )


def _why_no_run(path: Path) -> str:
    return f"{path} is no run: it has no {FINGERPRINT_FILE}" if path.is_dir() else f"there is no {path}"


def _owner(path: Path) -> str:
    for place in (path, *path.parents):
        try:
            return place.owner()
        except (OSError, KeyError):  # its folder may not be read either; or a user without a name
            continue
    return "another user"


def summary(run: RunState) -> dict[str, Any]:
    """A run as JSON has it."""
    return {
        "name": run.name,
        "path": str(run.path),
        "state": run.state,
        "reason": run.reason,
        "step": run.step,
        "metrics": dict(run.metrics),
        "best": asdict(run.best) if run.best is not None else None,
        "starts": run.starts,
        "started": run.started.isoformat() if run.started else None,
        "heartbeat_age_s": run.heartbeat_age_s,
    }


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of cells as lines with columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def or_dash(value: object) -> str:
    """A value, or a dash where there is none."""
    return "-" if value is None else str(value)


def metric(metrics: Mapping[str, Any]) -> str:
    """The metric that a run is judged by: a validation loss if there is one, else the first."""
    name = next((n for n in ("val/loss", "val_loss") if n in metrics), next(iter(metrics), None))
    if name is None:
        return "-"
    value = metrics[name]
    return f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"


def ago(seconds: float | None) -> str:
    """How long ago something was; a clock that is ahead makes it now, not the future."""
    if seconds is None:
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{max(0, int(seconds))} s ago"
