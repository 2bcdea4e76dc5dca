"""How long a signal would have waited: the longest time between two points where a loop looks for one."""

from __future__ import annotations

import time
from collections.abc import Callable


class LongestWait:
    """Measures it, for less than a microsecond a step; `at` says what the loop is at, for its longest part.

    Example:
        >>> times = iter([0.0, 1.0, 1.5, 42.5])
        >>> waits = LongestWait(lambda: next(times))
        >>> waits.served()  # at 1 s
        >>> waits.at("validate")  # from 1.5 s on
        >>> waits.served()
        >>> waits.seconds, waits.phase
        (41.5, 'validate')
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        """The longest so far."""
        self.phase = ""
        """What most of it was spent in."""
        self._clock = clock
        self._since = self._entered = clock()
        self._at = "start"
        self._spent: dict[str, float] = {}

    def at(self, phase: str) -> None:
        """The loop is at something else from now on."""
        if phase != self._at:
            now = self._clock()
            self._spent[self._at] = self._spent.get(self._at, 0.0) + now - self._entered
            self._at, self._entered = phase, now

    def served(self) -> None:
        """A signal that came before would be acted upon here."""
        now = self._clock()
        if now - self._since > self.seconds:
            self.seconds = now - self._since
            spent = {**self._spent, self._at: self._spent.get(self._at, 0.0) + now - self._entered}
            self.phase = max(spent, key=lambda phase: spent[phase])
        self._since = self._entered = now
        self._spent.clear()
