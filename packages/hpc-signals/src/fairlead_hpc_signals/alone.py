"""What a process alone needs of an agreement: nothing but its own flags."""

from __future__ import annotations

import time
from typing import Protocol

from fairlead_hpc_signals.channel import Channel
from fairlead_hpc_signals.decision import Answer, StopDecision, decide, request_of
from fairlead_hpc_signals.flags import SignalFlags

__all__ = ["LocalStop", "Stop"]


class Stop(Protocol):
    """Says at which boundary to stop."""

    decision: StopDecision | None

    @property
    def channel(self) -> Channel | None:
        """The other ranks; None where there are none."""
        ...

    def boundary(self, number: int) -> bool:
        """Whether to stop at this boundary."""
        ...

    def ask(self, why: str) -> None:
        """Asks for a stop without a signal."""
        ...

    def close(self) -> None:
        """Ends what runs in the background."""
        ...


class LocalStop:
    """The agreement of one process with itself; no store, no threads.

    Args:
        flags: The signals of this process.

    Example:
        >>> flags = SignalFlags()
        >>> stop = LocalStop(flags)
        >>> stop.boundary(1)
        False
        >>> flags.note(10)
        >>> stop.boundary(2), stop.decision.signals
        (True, ('SIGUSR1',))
    """

    def __init__(self, flags: SignalFlags) -> None:
        self.decision: StopDecision | None = None
        self.channel: Channel | None = None
        self._flags = flags
        self._asked: tuple[str, float] | None = None

    def boundary(self, number: int) -> bool:
        """Whether a signal has come, or `ask` was called."""
        if not self._flags.raised and self._asked is None:
            return False
        if self.decision is None:
            self.decision = decide([Answer(number, request_of(0, self._flags, self._asked))])
        return number >= self.decision.boundary

    def ask(self, why: str) -> None:
        """Asks for a stop without a signal."""
        if self._asked is None:
            self._asked = (why, time.time())

    def close(self) -> None:
        """Nothing runs in the background."""
