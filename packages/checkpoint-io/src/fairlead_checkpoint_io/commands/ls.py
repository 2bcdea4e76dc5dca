"""`fairlead checkpoint ls`: what checkpoints a run has, and in which state they are."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from fairlead.cli.session import Session
from fairlead.errors import CheckpointError, ConfigError
from fairlead_checkpoint_io.commands.places import checkpoints_folder, existing
from fairlead_checkpoint_io.commands.rows import HEADER, Listing, Row
from fairlead_checkpoint_io.commands.stored import is_stored
from fairlead_checkpoint_io.commands.stored_views import listed
from fairlead_runs.commands.texts import ago, table
from fairlead_runs.commit import Checkpoint, is_kept_forever, read_latest, verify
from fairlead_runs.commit.checkpoints import NAME, STAGE, TEMPORARY, TRASH
from fairlead_runs.commit.files import disk_error

__all__ = ["run"]

_THREADS: Final = 16  # a network file system answers many questions at a time, each slowly
_UNFINISHED: Final = {
    STAGE: "unfinished: being written, or left by a killed start",
    TRASH: "half deleted: a start was killed while it deleted this",
    TEMPORARY: "a temporary file of a killed start",
}


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Lists the checkpoints of a run, a folder, or a single one."""
    found = listed(arguments.path) if is_stored(arguments.path) else _listed(existing(arguments.path, session))
    if arguments.json:
        document = {"path": found.root, "latest": found.latest, "checkpoints": [asdict(row) for row in found.rows]}
        session.print_json({**document, "unfinished": found.unfinished})
        return 0
    if not found.rows and not found.unfinished:
        session.print(f"no checkpoints in {found.root}")
    if found.rows:
        for line in table([HEADER, *(row.cells() for row in found.rows)]):
            session.print(line)
    for item in found.unfinished:
        session.print(f"{item['name']}: {item['problem']}{_touched(item['age_s'])}")
    return 0


def _listed(path: Path) -> Listing:
    folder = checkpoints_folder(path)
    if folder is None and not NAME.fullmatch(path.name):
        raise ConfigError(
            "ls lists the checkpoints of a run",
            where=str(path),
            why="this is a single checkpoint without a manifest of Fairlead's",
            fix="`fairlead checkpoint verify` says whether it is whole",
        )
    names = _names(folder) if folder is not None else [path.name]
    root = folder if folder is not None else path.parent
    rows, found = _rows(root, names)
    latest = read_latest(root)
    unfinished = _unfinished(root, names)
    if latest is not None and not (root / latest).is_dir():
        unfinished.append({"name": "latest", "problem": f"names {latest}, which is not there", "age_s": None})
    listing = Listing(str(root), latest, rows, unfinished)
    listing.label(found, {name for name, checkpoint in found.items() if is_kept_forever(checkpoint)})
    return listing


def _rows(root: Path, names: Sequence[str]) -> tuple[list[Row], dict[str, Checkpoint]]:
    """All checkpoints, oldest first, damaged ones by their step; and those of them that can be read."""
    found: dict[str, Checkpoint] = {}

    def row(name: str) -> tuple[tuple[int, int, int], Row]:
        checkpoint = Checkpoint.at(root / name)
        order = (-1, checkpoint.step, checkpoint.version)
        made = Row(name, str(checkpoint.path), step=checkpoint.step)
        try:
            made.describe(checkpoint, verify(checkpoint.path))
            order = checkpoint.order
            found[name] = checkpoint
        except CheckpointError as error:
            made.damage = [error.why or error.what]
        made.complete = not made.damage
        return order, made

    own = [name for name in names if NAME.fullmatch(name) and (root / name).is_dir()]
    with ThreadPoolExecutor(_THREADS) as pool:
        ordered = sorted(pool.map(row, own), key=lambda pair: pair[0])
    plain = [_plain(root / name) for name in sorted(names) if name.endswith(".ckpt") and name not in own]
    return [*(made for _, made in ordered), *plain], found


def _plain(path: Path) -> Row:
    """A checkpoint without a manifest, as plain Lightning writes it."""
    size = path.stat().st_size if path.is_file() else None
    return Row(path.name, str(path), size=size, labels=["plain Lightning"])


def _unfinished(root: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    now = time.time()
    items = []
    for name in sorted(names):
        problem = next((text for prefix, text in _UNFINISHED.items() if name.startswith(prefix)), None)
        if problem is None:
            continue
        try:
            age: float | None = max(0.0, now - os.lstat(root / name).st_mtime)
        except OSError:  # it was finished or cleaned away while we looked
            continue
        items.append({"name": name, "problem": problem, "age_s": age})
    return items


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise disk_error(error, "cannot read the checkpoints", folder) from error


def _touched(age_s: float | None) -> str:
    return f" (last touched {ago(age_s)})" if age_s is not None else ""
