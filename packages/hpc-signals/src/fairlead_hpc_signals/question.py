"""The question to the scheduler why a job is to stop, which nothing waits for longer than there is time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fairlead.facts import StopReason
from fairlead_hpc_signals.deadline import Deadline
from fairlead_hpc_signals.outcomes import StopPolicy

_SHARE = 0.25  # of the time there is; a scheduler that has not answered by then needs the rest for the requeue
_STALE = 5.0  # seconds after which the scheduler is asked again before a requeue
_EARLY = 60.0  # seconds for an answer before any signal, which nobody waits for
_AGAIN = 2.0  # seconds for that; it has answered before


class Question:
    """Asks the scheduler in a thread of its own, from `start` on; rank 0 does it, or the rank that leads in its place.

    `ask` gets the seconds that the scheduler may take.
    """

    def __init__(self, ask: Callable[[float], StopReason], deadline: Deadline, policy: StopPolicy) -> None:
        self._ask = ask
        self._deadline = deadline
        self._policy = policy
        self._requested_at: float | None = None
        self._answered = threading.Event()
        self._starting = threading.Lock()
        self.reason = StopReason("unknown", "the scheduler did not answer in time")
        """The answer, or that there is none."""

    def ask_early(self) -> StopReason:
        """What the scheduler says before any signal: how long a stop may take."""
        reason = self._ask(_EARLY)
        self._deadline.expect(reason.remaining_s, reason.grace_s)
        return reason

    def start(self) -> None:
        """Asks, unless it was asked before."""
        with self._starting:
            if self._requested_at is None:
                self._requested_at = time.monotonic()
                threading.Thread(target=self._run, name="fairlead-ask", daemon=True).start()

    def answer(self) -> StopReason:
        """The answer, once it is there or there is no more time to wait for it."""
        self.start()
        assert self._requested_at is not None
        patience = self._requested_at + self._policy.ask_timeout_s - time.monotonic()
        self._answered.wait(max(0.0, min(patience, self._deadline.left_of(_SHARE))))
        return self.reason

    def answer_now(self) -> StopReason | None:
        """What the scheduler says by now: a person may have cancelled the job meanwhile; None: nothing new."""
        if not self._answered.is_set() or self._requested_at is None or time.monotonic() - self._requested_at < _STALE:
            return None
        now = self._ask(min(_AGAIN, self._policy.ask_timeout_s))
        return now if now.why != "unknown" else None

    def _run(self) -> None:
        self.reason = self._ask(max(self._policy.ask_timeout_s, self._deadline.left()))
        self._deadline.expect(None, self.reason.grace_s)
        if self.reason.remaining_s is not None:
            self._deadline.learn(self.reason.remaining_s)
        self._answered.set()
