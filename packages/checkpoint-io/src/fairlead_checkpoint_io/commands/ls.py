"""`fairlead checkpoint ls`: what checkpoints a run has, and in which state they are."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from fairlead.cli.session import Session
from fairlead.errors import CheckpointError, ConfigError
from fairlead_checkpoint_io.checkpoint_format import known_formats
from fairlead_checkpoint_io.commands.sources import checkpoints_folder, existing, is_stored, size_text, stored_run
from fairlead_checkpoint_io.files.formats import names_in
from fairlead_runs.commands.texts import ago, metric, or_dash, table
from fairlead_runs.commit import Checkpoint, Damage, best, is_kept_forever, read_latest, verify
from fairlead_runs.commit.checkpoints import NAME, STAGE, TEMPORARY, TRASH
from fairlead_runs.remote import RemoteCheckpoint

_THREADS: Final = 16  # a network file system answers many questions at a time, each slowly
_HEADER: Final = ("checkpoint", "step", "epoch", "metric", "size", "ranks", "kept as", "state")
_UPLOADING: Final = "unfinished: being uploaded, or left by a killed start"
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

    def describe(self, checkpoint: Checkpoint | RemoteCheckpoint, damages: Sequence[Damage]) -> None:
        """Says what the manifest says, and what is wrong."""
        metadata, manifest = checkpoint.metadata, checkpoint.manifest
        self.epoch, self.start, self.world_size = (metadata.get(name) for name in ("epoch", "start", "world_size"))
        if manifest is not None:
            self.created, self.size = manifest.created, manifest.size
        metrics = metadata.get("metrics")
        self.metrics = metrics if isinstance(metrics, dict) else {}
        self.damage = [f"{damage.file}: {damage.problem}" if damage.file else damage.problem for damage in damages]
        self.complete = not self.damage

    def cells(self) -> tuple[str, ...]:
        """A line of the table."""
        step, epoch, ranks = or_dash(self.step), or_dash(self.epoch), or_dash(self.world_size)
        if self.complete:
            state = "complete" if self.created else "not checked"
        else:
            more = f" and {len(self.damage) - 1} more" if len(self.damage) > 1 else ""
            state = f"DAMAGED: {self.damage[0]}{more}"
        retained_as = ", ".join(self.labels)
        return self.name, step, epoch, metric(self.metrics), size_text(self.size), ranks, retained_as, state


@dataclass
class Listing:
    """All checkpoints of a run or folder, and what is none yet or no more: its name, what it is, its age in seconds."""

    root: str
    latest: str | None
    rows: list[Row]
    unfinished: list[tuple[str, str, float | None]]

    def label(self, found: Mapping[str, Checkpoint] | Mapping[str, RemoteCheckpoint], forever: Collection[str]) -> None:
        """Says of those `found` which one a resume takes, which one is best, and which no retention deletes."""
        sound = [row for row in self.rows if row.complete and row.name in found]
        if not sound:
            return
        newest = found[sound[-1].name].metadata
        monitor, mode = newest.get("monitor"), newest.get("mode", "min")
        rated = best([found[row.name] for row in sound], monitor, mode) if isinstance(monitor, str) else []
        sound[-1].labels.append("last")
        for row in sound:
            if rated and row.name == rated[0].name:
                row.labels.append("best")
            if row.name in forever:
                row.labels.append("forever")


def run(arguments: argparse.Namespace, session: Session) -> int:
    """Lists the checkpoints of a run, a folder, or a single one."""
    stored = is_stored(arguments.path)
    found = _on_store(arguments.path) if stored else _on_disk(existing(arguments.path, session), session)
    if arguments.json:
        rows = [asdict(row) for row in found.rows]
        unfinished = [dict(zip(("name", "problem", "age_s"), item, strict=True)) for item in found.unfinished]
        session.print_json({"path": found.root, "latest": found.latest, "checkpoints": rows, "unfinished": unfinished})
        return 0
    if not found.rows and not found.unfinished:
        session.print(f"no checkpoints in {found.root}")
    if found.rows:
        for line in table([_HEADER, *(row.cells() for row in found.rows)]):
            session.print(line)
    for name, problem, age in found.unfinished:
        touched = f" (last touched {ago(age)})" if age is not None else ""
        session.print(f"{name}: {problem}{touched}")
    return 0


def _on_store(url: str) -> Listing:
    """The checkpoints of a run on a store, or the one that was named; only manifests are read."""
    run = stored_run(url)
    # Those whose manifest is damaged come first, as in a folder.
    ordered = sorted(run.found.checkpoints, key=lambda item: (item.manifest is not None, item.order))
    rows = [Row(item.name, item.url, step=item.step) for item in ordered]
    for row, item in zip(rows, ordered, strict=True):
        row.describe(item, item.damages())
    latest = run.latest
    listing = Listing(run.store.url, latest, rows, [(name, _UPLOADING, None) for name in run.found.unfinished])
    if run.lacks(latest):
        listing.unfinished.append(_missing(latest))
    found = {item.name: item for item in ordered if item.manifest is not None}
    listing.label(found, {name for name, item in found.items() if item.kept_forever})
    return listing


def _missing(latest: str | None) -> tuple[str, str, None]:
    return "latest", f"names {latest}, which is not there", None


def _on_disk(path: Path, session: Session) -> Listing:
    folder = checkpoints_folder(path, known_formats(session))
    if folder is None and not NAME.fullmatch(path.name):
        raise ConfigError(
            "ls lists the checkpoints of a run",
            where=str(path),
            why="this is a single checkpoint without a manifest of Fairlead's",
            fix="check it with `fairlead checkpoint verify`",
        )
    root = folder if folder is not None else path.parent
    names = [path.name] if folder is None else names_in(folder) if folder.exists() else []
    rows, found = _rows(root, names)
    listing = Listing(str(root), read_latest(root), rows, _unfinished(root, names))
    if listing.latest is not None and not (root / listing.latest).is_dir():
        listing.unfinished.append(_missing(listing.latest))
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
            made.damage, made.complete = [error.why or error.what], False
        return order, made

    own = [name for name in names if NAME.fullmatch(name) and (root / name).is_dir()]
    with ThreadPoolExecutor(_THREADS) as pool:
        ordered = sorted(pool.map(row, own), key=lambda pair: pair[0])
    rows = [made for _, made in ordered]
    for path in (root / name for name in sorted(names) if name.endswith(".ckpt") and name not in own):
        size = path.stat().st_size if path.is_file() else None
        rows.append(Row(path.name, str(path), size=size, labels=["plain Lightning"]))
    return rows, found


def _unfinished(root: Path, names: Sequence[str]) -> list[tuple[str, str, float | None]]:
    now = time.time()
    items: list[tuple[str, str, float | None]] = []
    for name in sorted(names):
        for problem in (text for prefix, text in _UNFINISHED.items() if name.startswith(prefix)):
            with contextlib.suppress(OSError):  # it was finished or cleaned away while we looked
                items.append((name, problem, max(0.0, now - os.lstat(root / name).st_mtime)))
    return items
