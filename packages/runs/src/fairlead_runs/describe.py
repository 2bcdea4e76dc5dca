"""Things as plain data, for the record and history of a run, and as words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

NO_CHECKPOINT: Final = "There is no checkpoint yet: the next start begins anew"
"""What the next start of a run does that has not saved anything."""


def described(thing: object) -> dict[str, Any]:
    """The class and the saved hyperparameters of a LightningModule or DataModule.

    Values that are not plain data are given by their type, to be the same in every process and at every start.
    """
    kind = type(thing)
    hparams = getattr(thing, "hparams_initial", None)
    args = plain(hparams, _type) if isinstance(hparams, Mapping) else {}
    return {"class": f"{kind.__module__}:{kind.__qualname__}", "args": args}


def plain(value: object, other: Callable[[object, str], str], path: str = "") -> Any:
    """A value in JSON types: NaN and infinity as text, what has no JSON type through `other`, which gets its path."""
    if isinstance(value, Mapping):
        return {str(key): plain(item, other, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, other, f"{path}.{index}") for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))  # which `float()` reads back
    return value if value is None or isinstance(value, (str, int, float)) else other(value, path)


def _type(value: object, path: str) -> str:
    return f"<{type(value).__module__}.{type(value).__qualname__}>"


def counted(n: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def shown_path(path: Path, cwd: Path) -> str:
    """A path as a reader knows it: from the working directory where it lies there."""
    return str(path.relative_to(cwd) if path.is_relative_to(cwd) else path)


def duration(seconds: float) -> str:
    """Seconds in the largest unit of which they are two or more.

    Example:
        >>> duration(0.02), duration(90), duration(600)
        ('20 ms', '90 s', '10 min')
    """
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 or not seconds else f"{seconds * 1000:.3g} ms"
