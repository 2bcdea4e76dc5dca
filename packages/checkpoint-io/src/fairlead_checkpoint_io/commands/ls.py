"""`fairlead checkpoint ls`: what checkpoints a run has, and in which state they are."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from fairlead.cli.session import Session
from fairlead.cli.texts import ago, metric, or_dash, table
from fairlead.commit import Checkpoint, best, is_kept_forever, read_latest, verify
from fairlead.commit.checkpoints import NAME, STAGE, TEMPORARY, TRASH
from fairlead.commit.files import disk_error
from fairlead.errors import CheckpointError, ConfigError
from fairlead_checkpoint_io.commands.places import checkpoints_folder, existing

__all__ = ["run", "size_text"]

_THREADS: Final = 16  # a network file system answers many questions at a time, each slowly
_UNFINISHED: Final = {
    STAGE: "unfinished: being written, or left by a killed start",
    TRASH: "half deleted: a start was killed while it deleted this",
    TEMPORARY: "a temporary file of a killed start",
}


@dataclass
class Row:
    """One checkpoint as it is listed; `damage` is empty where it is complete."""

    name: str
    path: str
    step: int | None = None
    epoch: int | None = None
    start: int | None = None
    created: str | None = None
    world_size: int | None = None
    size: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    labels: list[str] = field(default_factory=list)
    complete: bool = True
    damage: list[str] = field(default_factory=list)


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Lists the checkpoints of a run, a folder, or a single one."""
    path = existing(arguments.path, session)
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
    _label(rows, found)
    latest = read_latest(root)
    unfinished = _unfinished(root, names)
    if latest is not None and not (root / latest).is_dir():
        unfinished.append({"name": "latest", "problem": f"names {latest}, which is not there", "age_s": None})
    if arguments.json:
        document = {"path": str(root), "latest": latest, "checkpoints": rows, "unfinished": unfinished}
        session.print_json({**document, "checkpoints": [asdict(row) for row in rows]})
        return 0
    if not rows and not unfinished:
        session.print(f"no checkpoints in {root}")
    if rows:
        header = ("checkpoint", "step", "epoch", "metric", "size", "ranks", "kept as", "state")
        for line in table([header, *(_cells(row) for row in rows)]):
            session.print(line)
    for item in unfinished:
        session.print(f"{item['name']}: {item['problem']}{_touched(item['age_s'])}")
    return 0


def size_text(size: int | None) -> str:
    """Bytes for people, in powers of 1024.

    Example:
        >>> size_text(3 << 20)
        '3.0 MiB'
    """
    if size is None:
        return "-"
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def _rows(root: Path, names: Sequence[str]) -> tuple[list[Row], dict[str, Checkpoint]]:
    """All checkpoints, oldest first, damaged ones by their step; and those of them that can be read."""
    found: dict[str, Checkpoint] = {}

    def row(name: str) -> tuple[tuple[int, int, int], Row]:
        checkpoint = Checkpoint.at(root / name)
        order = (-1, checkpoint.step, checkpoint.version)
        made = Row(name, str(checkpoint.path), step=checkpoint.step)
        try:
            _describe(made, checkpoint)
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


def _describe(row: Row, checkpoint: Checkpoint) -> None:
    metadata = checkpoint.metadata
    row.epoch, row.start, row.world_size = (metadata.get(name) for name in ("epoch", "start", "world_size"))
    row.created = checkpoint.manifest.created
    row.size = checkpoint.manifest.size
    metrics = metadata.get("metrics")
    row.metrics = metrics if isinstance(metrics, dict) else {}
    row.damage = [
        f"{damage.file}: {damage.problem}" if damage.file else damage.problem for damage in verify(checkpoint.path)
    ]


def _plain(path: Path) -> Row:
    """A checkpoint without a manifest, as plain Lightning writes it."""
    size = path.stat().st_size if path.is_file() else None
    return Row(path.name, str(path), size=size, labels=["plain Lightning"])


def _label(rows: Sequence[Row], found: Mapping[str, Checkpoint]) -> None:
    """Says which one a resume takes, which one is best, and which no retention deletes."""
    sound = [row for row in rows if row.complete and row.name in found]
    if not sound:
        return
    newest = found[sound[-1].name].metadata
    monitor, mode = newest.get("monitor"), newest.get("mode", "min")
    rated = best([found[row.name] for row in sound], monitor, mode) if isinstance(monitor, str) else []
    sound[-1].labels.append("last")
    for row in sound:
        if rated and row.name == rated[0].name:
            row.labels.append("best")
        if is_kept_forever(found[row.name]):
            row.labels.append("forever")


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


def _cells(row: Row) -> tuple[str, ...]:
    step, epoch, ranks = or_dash(row.step), or_dash(row.epoch), or_dash(row.world_size)
    if row.complete:
        state = "complete" if row.created else "not checked"
    else:
        state = f"DAMAGED: {row.damage[0]}" + (f" and {len(row.damage) - 1} more" if len(row.damage) > 1 else "")
    return row.name, step, epoch, metric(row.metrics), size_text(row.size), ranks, ", ".join(row.labels), state


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise disk_error(error, "cannot read the checkpoints", folder) from error


def _touched(age_s: float | None) -> str:
    return f" (last touched {ago(age_s)})" if age_s is not None else ""
