"""What the ranks have agreed on where a step is over, whatever the engine."""

from __future__ import annotations

from typing import Final, Literal

from fairlead_distributed.run.session import RunSession
from fairlead_runs.guard import StopGuard
from fairlead_runs.pace import UNSERVED

_SHORT_S: Final = 5.0
"""Seconds that a signal may wait for a boundary before that is recorded, and shown by `fairlead status`."""
_LONGER: Final = 1.1
"""How much longer the next wait has to be to be recorded too: the history would grow with every step otherwise."""


class Boundary:
    """A place to which all ranks come equally often, and where a stop or a checkpoint can be carried out.

    Example:
        >>> match boundary.agreed():  # doctest: +SKIP
        ...     case "stop":
        ...         save_and_leave()
        ...     case "save":
        ...         save()
    """

    def __init__(self, session: RunSession, guard: StopGuard) -> None:
        self._session = session
        self._guard = guard
        self._next_recorded_s = _SHORT_S
        session.on_phase = guard.waits.at

    def agreed(self) -> Literal["stop", "save"] | None:
        """Whether all ranks stop or save here because somebody has requested it; the engine sees to periodic saves.

        All ranks call it together and get the same answer. A call increments a counter, and talks to nobody.
        """
        stops = self._guard.should_stop()
        waits = self._guard.waits
        if waits.seconds >= self._next_recorded_s:
            self._next_recorded_s = _LONGER * waits.seconds
            self._session.event(UNSERVED, seconds=round(waits.seconds, 1), phase=waits.phase)
        if stops:
            return "stop"
        requested = self._guard.should_save()
        return "save" if self._session.proof_saves() or requested else None
