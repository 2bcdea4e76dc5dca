"""What a start saw of loaders and state, `starts/N/exactness.json` in the run directory; and what that amounts to."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel

from fairlead.findings import Inexact

EXACTNESS_FILE: Final = "exactness.json"
TRIAL: Final = 0
"""The number under which `fast_dev_run` writes what it saw; it is no start of the run, and leaves nothing else."""

Verdict = Literal["exact", "not exact", "not known"]


def verdict(reasons: Iterable[Inexact]) -> Verdict:
    """What reasons against an exact resume amount to; without any, it is exact as far as `explain` says it goes."""
    certain = [reason.certain for reason in reasons]
    return "not exact" if any(certain) else "not known" if certain else "exact"


def sentence(reason: Inexact) -> str:
    """A reason as `explain` says it."""
    word = "not exact" if reason.certain else "not known"
    return f"{word}, because of {reason.what} ({reason.why}), do: {reason.fix}"


@dataclass(frozen=True)
class Recorded:
    """What a start has recorded; its number is `TRIAL` for a `fast_dev_run`.

    `written` is in seconds since 1970: code that is newer was not seen. `world_size` and `job` may not be recorded.
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
    """Names what decides which loaders and which state a start sees: model, data, callbacks, and whose samplers."""
    trainer = job.get("trainer") or {}
    named = [job.get("model"), job.get("data"), trainer.get("callbacks"), trainer.get("use_distributed_sampler")]
    return hashlib.sha256(json.dumps(_text_keys(named), sort_keys=True, default=str).encode()).hexdigest()


def _text_keys(value: Any) -> Any:
    """Nested data whose keys can be sorted: integers and texts cannot."""
    if isinstance(value, Mapping):
        return {str(key): _text_keys(item) for key, item in value.items()}
    return list(map(_text_keys, value)) if isinstance(value, list | tuple) else value


def record(
    *, settings: Iterable[Inexact], seen: Iterable[Inexact], world_size: int, job: str | None = None
) -> dict[str, Any]:
    """The content of `exactness.json`: what `device_reasons` gave, and what was seen of loaders and state."""
    parts = {"settings": tuple(settings), "seen": tuple(seen)}
    reasons = [{**dataclasses.asdict(one), "about": about} for about, part in parts.items() for one in part]
    exact = verdict([*parts["settings"], *parts["seen"]]) == "exact"
    return {"exact": exact, "world_size": world_size, "job": job, "reasons": reasons}


def last_record(run: Path, job: str | None = None) -> Recorded | None:
    """The newest record in a run directory, None without one; a record that names another job does not count."""
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
    seen = [one for one in found.reasons if one.about != "settings"]
    reasons = tuple(Inexact(one.what, why=one.why, fix=one.fix, certain=one.certain) for one in seen)
    return Recorded(number, reasons, found.world_size, written, found.job)


class _Reason(BaseModel):
    what: str
    why: str
    fix: str
    certain: bool = True
    about: str = "seen"


class _File(BaseModel):
    exact: bool
    reasons: list[_Reason]
    world_size: int | None = None
    job: str | None = None
