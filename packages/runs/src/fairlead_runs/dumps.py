"""Where a run keeps what was written when it failed or hung: stacks of every rank, and torch's flight recorder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_STACKS, _FLIGHT_RECORDER = "stacks", "flight-recorder"


@dataclass(frozen=True)
class Dumps:
    """A folder with one file for each rank.

    Attributes:
        kind: `stacks` or `flight-recorder`.
        path: The folder.
        files: How many files it and its subfolders hold.
    """

    kind: str
    path: Path
    files: int


def stack_folder(run: Path, start: int) -> Path:
    """Where the stacks of a start go, as `rank-00003.txt`."""
    return run / _STACKS / f"start-{start}"


def flight_recorder_folder(run: Path, start: int) -> Path:
    """Where torch's flight recorder of a start goes, a folder for each recorder: `gloo/rank_3`."""
    return run / _FLIGHT_RECORDER / f"start-{start}"


def find_dumps(run: Path) -> list[Dumps]:
    """What the last start that failed or hung has left."""
    folders = [folder for kind in (_STACKS, _FLIGHT_RECORDER) for folder in (run / kind).glob("start-*")]
    numbers = [int(number) for folder in folders if (number := folder.name.removeprefix("start-")).isdecimal()]
    if not numbers:
        return []
    start = max(numbers)
    last = ((_STACKS, stack_folder(run, start)), (_FLIGHT_RECORDER, flight_recorder_folder(run, start)))
    counted = [Dumps(kind, path, sum(len(files) for _, _, files in os.walk(path))) for kind, path in last]
    return [dumps for dumps in counted if dumps.files]
