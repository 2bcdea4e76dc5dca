"""What tests read of a run directory."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from fairlead_runs import read_history
from fairlead_runs.commit import Checkpoint, list_checkpoints, newest_complete


def events(run: Path, name: str | None = None) -> list[dict[str, Any]]:
    return [dict(one) for one in read_history(run / "history.jsonl") if name in (None, one["event"])]


def checkpoints(run: Path) -> list[Checkpoint]:
    return list_checkpoints(run / "checkpoints")


def latest(run: Path) -> Checkpoint:
    found = newest_complete(run / "checkpoints").checkpoint
    assert found is not None
    return found


def metric_rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def contents(root: Path) -> dict[str, bytes]:
    """The files below a directory, but for what only tells that a process was here."""
    files = (path for path in root.rglob("*") if path.is_file() and not {"heartbeats", "locks"} & set(path.parts))
    return {str(path.relative_to(root)): path.read_bytes() for path in files}
