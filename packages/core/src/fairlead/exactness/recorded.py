"""What a start saw of loaders and state: `starts/N/exactness.json` in the run directory."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from fairlead.exactness.verdicts import verdict
from fairlead.findings import Inexact

EXACTNESS_FILE: Final = "exactness.json"
TRIAL: Final = 0
"""The number under which `fast_dev_run` writes what it saw; it is no start of the run, and leaves nothing else."""


@dataclass(frozen=True)
class Recorded:
    """What a start has recorded.

    Args:
        start: Its number; `TRIAL`: a `fast_dev_run`.
        seen: What it saw of loaders and state.
        world_size: The ranks it had; None: not recorded.
        written: When, in seconds since 1970; code that is newer was not seen.
        job: The `job_digest` of the job; None: not recorded.
    """

    start: int
    seen: tuple[Inexact, ...]
    world_size: int | None
    written: float
    job: str | None = None

    @property
    def by(self) -> str:
        """Who saw it, as in a sentence."""
        return "fast_dev_run" if self.start == TRIAL else f"start {self.start}"


def job_digest(job: Mapping[str, Any]) -> str:
    """Names what decides which loaders and which state a start sees: model, data, callbacks, and whose samplers.

    Args:
        job: The fully dumped job.
    """
    trainer = job.get("trainer") or {}
    named = [job.get("model"), job.get("data"), trainer.get("callbacks"), trainer.get("use_distributed_sampler")]
    return hashlib.sha256(json.dumps(named, sort_keys=True, default=str).encode()).hexdigest()


def record(
    *, settings: Iterable[Inexact], seen: Iterable[Inexact], world_size: int, job: str | None = None
) -> dict[str, Any]:
    """The content of `exactness.json`.

    Args:
        settings: What `device_reasons` gave.
        seen: What was seen of loaders and state.
        world_size: Ranks in all.
        job: The `job_digest`.

    Example:
        >>> record(settings=[], seen=[], world_size=1)
        {'exact': True, 'world_size': 1, 'job': None, 'reasons': []}
    """
    parts = {"settings": tuple(settings), "seen": tuple(seen)}
    reasons = [{**dataclasses.asdict(one), "about": about} for about, part in parts.items() for one in part]
    exact = verdict([*parts["settings"], *parts["seen"]]) == "exact"
    return {"exact": exact, "world_size": world_size, "job": job, "reasons": reasons}


def last_record(run: Path, job: str | None = None) -> Recorded | None:
    """What the newest start that has recorded it saw; None when there is none, or none can be read.

    Args:
        run: The run directory.
        job: The `job_digest` of the job that is asked about: a record of another one does not count.
    """
    found = []
    for path in run.glob(f"starts/*/{EXACTNESS_FILE}"):
        name = path.parent.name
        one = _read(path, int(name)) if name.isascii() and name.isdecimal() else None
        if one is not None and (job is None or one.job in (None, job)):
            found.append(one)
    return max(found, key=lambda one: (one.written, one.start), default=None)


def _read(path: Path, number: int) -> Recorded | None:
    """None where a start was killed while it wrote, or another version wrote."""
    try:
        found = _File.model_validate_json(path.read_bytes(), strict=True)
        written = path.stat().st_mtime
    except (OSError, ValueError):
        return None
    if not found.reasons and not found.exact:
        return None
    seen = [Inexact(one.what, why=one.why, fix=one.fix, certain=one.certain) for one in found.reasons if one.is_seen]
    return Recorded(number, tuple(seen), found.world_size, written, found.job)


class _Reason(BaseModel):
    what: str
    why: str
    fix: str
    certain: bool = True
    about: str = "seen"

    @property
    def is_seen(self) -> bool:
        return self.about != "settings"


class _File(BaseModel):
    exact: bool
    reasons: list[_Reason]
    world_size: int | None = None
    job: str | None = None
