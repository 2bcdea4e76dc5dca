"""Rows that a service cannot take back: what an earlier start has logged there is not logged once more.

A start that resumes trains the steps behind its checkpoint again, and logs the same values again. `metrics.csv` and
TensorBoard are cut back for that; a service on the network, and W&B's record on disk, are not ours to cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

PENDING: Final = "pending"
"""The key, in a logger's position, of the rows that its service may not have."""


class LoggedBefore:
    """Which values of which steps are there from earlier starts.

    Args:
        rows: What is there: (step, the names of its values).

    Example:
        >>> before = LoggedBefore([(6, ["loss"]), (7, ["loss"])])
        >>> before.without(7, {"loss": 0.1, "val": 0.2}), before.without(8, {"loss": 0.1})
        ({'val': 0.2}, {'loss': 0.1})
    """

    def __init__(self, rows: Iterable[tuple[int, Iterable[str]]] = ()) -> None:
        self._names: dict[int, set[str]] = {}
        for step, names in rows:
            self.add(step, names)

    def add(self, step: int, names: Iterable[str]) -> None:
        """These are there now."""
        self._names.setdefault(step, set()).update(names)

    def forget(self, before: int) -> None:
        """Steps before this one are not logged again, and need not be known."""
        self._names = {step: names for step, names in self._names.items() if step >= before}

    def without(self, step: int | None, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values that are not there yet, and the epoch, which Lightning adds to every row."""
        names = self._names.get(step) if step is not None else None
        if not names:
            return dict(values)
        lacking = {name for name in values if name not in names and not _is_epoch(name)}
        return {name: value for name, value in values.items() if name in lacking or (lacking and _is_epoch(name))}


def plain_rows(rows: Iterable[tuple[int, Mapping[str, Any]]]) -> list[list[Any]]:
    """Rows as plain data, for a checkpoint: their numbers, texts and truth values; images and tables stay behind."""
    plain: list[list[Any]] = []
    for step, values in rows:
        scalars = {name: _scalar(value) for name, value in values.items()}
        kept = {name: value for name, value in scalars.items() if isinstance(value, int | float | str)}
        if kept:
            plain.append([step, kept])
    return plain


def pending_rows(position: Mapping[str, Any] | None) -> list[tuple[int, dict[str, Any]]]:
    """The rows of `plain_rows` in a position; none of a position of another version of Fairlead."""
    rows = position.get(PENDING) if position is not None else None
    try:
        return [(int(step), dict(values)) for step, values in rows or ()]
    except (TypeError, ValueError):
        return []


def _is_epoch(name: str) -> bool:
    return name.rpartition("-")[2] == "epoch"  # a prefix may be before it


def _scalar(value: Any) -> Any:
    return value.item() if getattr(value, "ndim", None) == 0 else value
