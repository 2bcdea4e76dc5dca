"""What a start saw of its loaders: `starts/N/exactness.json` in the run directory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fairlead.exactness.reasons import verdict
from fairlead.findings import Inexact

__all__ = ["EXACTNESS_FILE", "Recorded", "last_record", "record"]

EXACTNESS_FILE: Final = "exactness.json"


@dataclass(frozen=True)
class Recorded:
    """What a start has recorded.

    Args:
        start: Its number.
        loaders: What it saw of the loaders.
        world_size: The ranks it had; None: not recorded.
        written: When, in seconds since 1970; code that is newer was not seen.
    """

    start: int
    loaders: tuple[Inexact, ...]
    world_size: int | None
    written: float


def record(*, settings: Iterable[Inexact], loaders: Iterable[Inexact], world_size: int) -> dict[str, Any]:
    """The content of `exactness.json`.

    Args:
        settings: What `device_reasons` gave, and what else does not come from the loaders.
        loaders: What was seen of the loaders.
        world_size: Ranks in all.

    Example:
        >>> record(settings=[], loaders=[], world_size=1)
        {'exact': True, 'world_size': 1, 'reasons': []}
    """
    parts = {"settings": tuple(settings), "loaders": tuple(loaders)}
    reasons = [
        {"what": one.what, "why": one.why, "fix": one.fix, "certain": one.certain, "about": about}
        for about, part in parts.items()
        for one in part
    ]
    exact = verdict([*parts["settings"], *parts["loaders"]]) == "exact"
    return {"exact": exact, "world_size": world_size, "reasons": reasons}


def last_record(run: Path) -> Recorded | None:
    """What the newest start of a run that has recorded it saw; None when there is none, or it cannot be read.

    Args:
        run: The run directory.
    """
    numbers = sorted(
        (int(p.parent.name) for p in run.glob(f"starts/*/{EXACTNESS_FILE}") if _is_number(p)), reverse=True
    )
    for number in numbers:
        found = _read(run / "starts" / str(number) / EXACTNESS_FILE, number)
        if found is not None:
            return found
    return None


def _is_number(path: Path) -> bool:
    return path.parent.name.isascii() and path.parent.name.isdecimal()


def _read(path: Path, number: int) -> Recorded | None:
    """None where a start was killed while it wrote, or another version wrote: then the sources are read."""
    try:
        found = json.loads(path.read_bytes())
        written = path.stat().st_mtime
    except (OSError, ValueError):
        return None
    reasons = found.get("reasons") if isinstance(found, dict) else None
    if not isinstance(reasons, list) or not isinstance(found.get("exact"), bool):
        return None
    loaders = [_reason(one) for one in reasons if not (isinstance(one, Mapping) and one.get("about") == "settings")]
    known = [one for one in loaders if one is not None]
    if len(known) < len(loaders) or (not reasons and not found["exact"]):
        return None
    ranks = found.get("world_size")
    return Recorded(number, tuple(known), ranks if isinstance(ranks, int) else None, written)


def _reason(one: Any) -> Inexact | None:
    if not isinstance(one, Mapping) or not all(isinstance(one.get(name), str) for name in ("what", "why", "fix")):
        return None
    return Inexact(one["what"], why=one["why"], fix=one["fix"], certain=one.get("certain", True) is not False)
