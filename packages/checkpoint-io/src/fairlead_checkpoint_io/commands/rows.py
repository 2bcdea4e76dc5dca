"""What `fairlead checkpoint ls` shows of one place, wherever that is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fairlead_runs.commands.texts import metric, or_dash
from fairlead_runs.commit import Checkpoint, Damage, best
from fairlead_runs.remote import RemoteCheckpoint

__all__ = ["HEADER", "Listing", "Row", "size_text"]

HEADER = ("checkpoint", "step", "epoch", "metric", "size", "ranks", "kept as", "state")


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

    def cells(self) -> tuple[str, ...]:
        """A line of the table, as `HEADER` names its columns."""
        step, epoch, ranks = or_dash(self.step), or_dash(self.epoch), or_dash(self.world_size)
        if self.complete:
            state = "complete" if self.created else "not checked"
        else:
            more = f" and {len(self.damage) - 1} more" if len(self.damage) > 1 else ""
            state = f"DAMAGED: {self.damage[0]}{more}"
        kept = ", ".join(self.labels)
        return self.name, step, epoch, metric(self.metrics), size_text(self.size), ranks, kept, state


@dataclass
class Listing:
    """All checkpoints of one place.

    Attributes:
        root: A folder or a URL.
        latest: What its file `latest` names.
        rows: Oldest first.
        unfinished: What is no checkpoint yet, or no more: `name`, `problem`, `age_s`.
    """

    root: str
    latest: str | None
    rows: list[Row]
    unfinished: list[dict[str, Any]]

    def label(self, found: Mapping[str, Checkpoint | RemoteCheckpoint], forever: Collection[str]) -> None:
        """Says which one a resume takes, which one is best, and which no retention deletes.

        Args:
            found: Those that can be read, by name.
            forever: The names of those that are marked.
        """
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
