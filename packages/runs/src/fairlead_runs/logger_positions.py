"""Where each logger stands when a checkpoint is saved, and where a start that resumes from it begins."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

from fairlead.errors import FairleadError

LOGGER_POSITIONS: Final = "logger_positions"
"""The key of the positions in a checkpoint, and in the extras of the `BuildContext`."""
PENDING: Final = "pending"
"""The key, in a logger's position, of the rows that its service may not have."""


@runtime_checkable
class Positioned(Protocol):
    """A logger that can be cut back to where it stood when a checkpoint was saved.

    A step does not tell enough: a validation that is logged after the save may be of the same one.
    """

    position_key: ClassVar[str]
    """Names the logger's position among those of a checkpoint; Lightning's `name` may be empty."""

    def position(self) -> dict[str, Any] | None:
        """Where it stands: numbers, strings, lists and dictionaries of them; None on the ranks that log nothing.

        What was logged before is on the disk when this returns, else it raises a `FairleadError`.
        """
        ...


def logger_positions(loggers: Iterable[object]) -> dict[str, Any]:
    """Where the loggers stand, by `position_key`, for a checkpoint that is committed later: it is never ahead of them.

    A disk that refuses is a warning: a start that resumes from this checkpoint cuts that logger by the step.
    """
    positions: dict[str, Any] = {}
    for logger in loggers:
        if not isinstance(logger, Positioned):
            continue
        try:
            position = logger.position()
        except (FairleadError, OSError) as error:
            text = error.block() if isinstance(error, FairleadError) else str(error)
            warnings.warn(f"the checkpoint does not know where {logger.position_key} stands: {text}", stacklevel=2)
            continue
        if position is not None:
            positions[logger.position_key] = position
    return positions


def resume_position(extras: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """The position of a logger among those of the `BuildContext.extras`, or of a checkpoint; None: there is none."""
    positions = extras.get(LOGGER_POSITIONS)
    position = positions.get(key) if isinstance(positions, Mapping) else None
    return position if isinstance(position, Mapping) else None


def plain_rows(rows: Iterable[tuple[int, Mapping[str, Any]]]) -> list[list[Any]]:
    """Rows as plain data, for a checkpoint: their numbers, texts and truth values; images and tables stay behind."""
    plain: list[list[Any]] = []
    for step, values in rows:
        scalars = {name: _scalar(value) for name, value in values.items()}
        plain_values = {name: value for name, value in scalars.items() if isinstance(value, int | float | str)}
        if plain_values:
            plain.append([step, plain_values])
    return plain


def pending_rows(position: Mapping[str, Any] | None) -> list[tuple[int, dict[str, Any]]]:
    """The rows of `plain_rows` in a position; none of a position of another version of Fairlead."""
    rows = position.get(PENDING) if position is not None else None
    try:
        return [(int(step), dict(values)) for step, values in rows or ()]
    except (TypeError, ValueError):
        return []


def _scalar(value: Any) -> Any:
    return value.item() if getattr(value, "ndim", None) == 0 else value
