"""How long a signal would have waited at most, as a run has measured and `fairlead status` says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from fairlead_runs.history import read_history

UNSERVED: Final = "unserved"
"""The event of a longest wait so far, of five seconds or more: `seconds`, and the `phase` that took most of them."""

_IN: Final = {
    "start": "while it started",
    "prepare": "while data were prepared",
    "setup": "while it was set up and its checkpoint loaded",
    "restore": "while its state was restored",
    "first-batch": "in the first batch and step of an epoch",
    "validate": "in validation",
    "sanity": "in the sanity check",
    "save": "while it saved",
    "train": "in a step",
}


def longest_wait(run: Path) -> dict[str, Any] | None:
    """`seconds` and `phase` of the longest wait of the newest start; None: it knows of none of five seconds or more."""
    for event in reversed(read_history(run / "history.jsonl")):
        if event["event"] == UNSERVED:
            return {"seconds": event.get("seconds"), "phase": event.get("phase")}
        if event["event"] == "start":
            break
    return None


def wait_line(wait: dict[str, Any] | None) -> list[str]:
    """The line of `fairlead status`, if there is something to say.

    Example:
        >>> wait_line({"seconds": 41.3, "phase": "validate"})
        ['longest time in which a signal would have waited: 41 s, in validation']
    """
    if wait is None or not isinstance(wait["seconds"], int | float):
        return []
    where = _IN.get(str(wait["phase"]), f"in {wait['phase']}")
    return [f"longest time in which a signal would have waited: {wait['seconds']:.0f} s, {where}"]
