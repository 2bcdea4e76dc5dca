"""Where each logger stands when a checkpoint is saved, and where a start that resumes from it begins."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

from fairlead.errors import FairleadError

LOGGER_POSITIONS: Final = "logger_positions"
"""The key of the positions in a checkpoint, and in the extras of the `BuildContext`."""


@runtime_checkable
class Positioned(Protocol):
    """A logger that can be cut back to where it stood when a checkpoint was saved.

    A step does not tell enough: what is logged after the save may be of the same step, such as a
    validation that was due.
    """

    position_key: ClassVar[str]
    """Names the logger's position among those of a checkpoint; Lightning's `name` may be empty."""

    def position(self) -> dict[str, Any] | None:
        """Where it stands: numbers, strings, lists and dictionaries of them.

        What was logged before is on the disk when this returns.  None on the ranks that log nothing.

        Raises:
            FairleadError: The disk refused.
        """
        ...


def logger_positions(loggers: Iterable[object]) -> dict[str, Any]:
    """Where the loggers stand, for a checkpoint; called before it is committed, so that it is never ahead of them.

    A disk that refuses is a warning, and that logger has no position in this checkpoint: a start
    that resumes from it cuts by the step.

    Args:
        loggers: The trainer's; those without a position, such as W&B, are left out.

    Returns:
        The positions by `position_key`; empty on ranks other than 0.

    Example:
        >>> logger_positions([object()])
        {}
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
    """The position that a logger resumes from.

    Args:
        extras: The `BuildContext.extras`, or a checkpoint, with the positions under `logger_positions`.
        key: The logger's `position_key`.

    Example:
        >>> resume_position({"logger_positions": {"metrics.csv": {"step": 3}}}, "metrics.csv")
        {'step': 3}
    """
    positions = extras.get(LOGGER_POSITIONS)
    position = positions.get(key) if isinstance(positions, Mapping) else None
    return position if isinstance(position, Mapping) else None
