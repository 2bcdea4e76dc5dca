"""How long a signal would have waited: the longest time between two places where a loop looks for one."""

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
        self._since = clock()
        self._phase = "start"
        self._entered = [(self._since, self._phase)]

    def at(self, phase: str) -> None:
        """The loop is at something else from now on."""
        if phase != self._phase:
            self._phase = phase
            self._entered.append((self._clock(), phase))

    def served(self) -> None:
        """A signal that came before would be acted upon here."""
        now = self._clock()
        if now - self._since > self.seconds:
            self.seconds = now - self._since
            self.phase = self._longest(now)
        self._since = now
        if len(self._entered) > 1:
            del self._entered[:-1]

    def _longest(self, now: float) -> str:
        """The phase in which most of the time since the last place was spent."""
        starts = [(max(at, self._since), phase) for at, phase in self._entered]
        ends = [*(at for at, _ in starts[1:]), now]
        spent: dict[str, float] = {}
        for (start, phase), end in zip(starts, ends, strict=True):
            spent[phase] = spent.get(phase, 0.0) + end - start
        return max(spent, key=lambda phase: spent[phase], default="")
