"""Signals that come before there is something that can stop: kept, and raised again where somebody handles them."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Final

__all__ = ["EarlySignals"]

_KEPT: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class EarlySignals:
    """Keeps the signals that ask for a stop inside the block; behind it they come to the handlers of then.

    While a job is read and checked, SIGUSR1 would end the process, and a scheduler's warning would not be a stop that
    asks for another start.

    Example:
        >>> with EarlySignals() as early:
        ...     early.release()
        []
    """

    def __init__(self) -> None:
        self._came: list[int] = []
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> EarlySignals:
        if threading.current_thread() is threading.main_thread():
            for number in _KEPT:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._earlier[number] = signal.signal(number, self._keep)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number in self.release():
            signal.raise_signal(number)

    def release(self) -> list[int]:
        """Puts the handlers of before back, and gives what came; whoever calls this sees to it."""
        for number, handler in self._earlier.items():
            if signal.getsignal(number) == self._keep:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._earlier.clear()
        came, self._came = self._came, []
        return came

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)
