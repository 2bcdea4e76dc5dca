"""How long there is after a signal: one deadline, into which agreement, save and requeue have to fit."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from fairlead.detect import find_jobs
from fairlead.facts import StopReason
from fairlead.plugins import default_plugins
from fairlead_hpc_signals.flags import SignalFlags
from fairlead_hpc_signals.outcomes import StopPolicy

KILL_WAIT: Final = 30.0
"""Seconds between SIGTERM and SIGKILL if the scheduler does not report it: SLURM's own default."""
WARNED: Final = 600.0
"""Seconds that a warning, as SIGUSR1, is taken to come ahead until the scheduler reports when it ends the job."""
_TWICE: Final = 10.0  # seconds within which a second SIGTERM belongs to the first: slurmd and srun each send one
_REQUEUE: Final = 10.0  # seconds that are reserved for the requeue


class Deadline:
    """When the scheduler ends this process, as well as this rank knows it; it counts from `begin`.

    What counts, in this order: `StopPolicy.grace_s`; the scheduler's answer; in a scheduler's job its answer at
    the start of the loop, else 30 s after SIGTERM and 600 s after a warning; never more than
    `StopPolicy.save_timeout_s`.
    """

    def __init__(self, flags: SignalFlags, environ: Mapping[str, str], policy: StopPolicy) -> None:
        self._flags = flags
        self._policy = policy
        self.in_job = bool(find_jobs(environ, default_plugins()))
        self._began = math.inf
        self._announced_end: float | None = None
        self._announced_at = 0.0
        self._kill_wait = KILL_WAIT
        self._expected = math.inf

    def begin(self) -> None:
        """A stop was requested of this rank; the first time counts."""
        self._began = min(self._began, time.monotonic())

    def expect(self, remaining_s: float | None, grace_s: float | None) -> None:
        """What the scheduler answered before any signal: it may not answer when one comes."""
        if remaining_s is not None:
            self._expected = time.monotonic() + remaining_s
        if grace_s is not None:
            self._kill_wait = grace_s

    def learn(self, remaining_s: float) -> None:
        """The scheduler has reported when it ends the job; not every answer includes the time after SIGTERM."""
        self.begin()
        self._announced_end = max(time.monotonic() + remaining_s, self._began + self._kill_wait)
        self._announced_at = time.time()

    def left(self) -> float:
        """Seconds until the end."""
        return self._end() - time.monotonic()

    def left_to_save(self) -> float:
        """Seconds until the requeue must begin, whatever is saved by then."""
        return self.left() - min(_REQUEUE, self._total() / 3)

    def left_of(self, share: float) -> float:
        """Seconds until a share of the total time is over."""
        return self.left() - (1 - share) * self._total()

    def _total(self) -> float:
        return max(0.0, self._end() - self._began)

    def _end(self) -> float:
        self.begin()
        return min(self._granted(), self._began + self._policy.save_timeout_s)

    def _granted(self) -> float:
        if self._policy.grace_s is not None:
            return self._began + self._policy.grace_s
        since = self._announced_at + _TWICE if self._announced_end is not None else 0.0
        terminated = next((f.time for f in self._flags.flags if f.signal == "SIGTERM" and f.time > since), None)
        if terminated is not None and self.in_job:
            return min(time.monotonic() - (time.time() - terminated) + self._kill_wait, self._announced_end or math.inf)
        if self._announced_end is not None:
            return self._announced_end
        if not self.in_job:
            return math.inf
        return self._began + min(WARNED, max(self._expected - self._began, self._kill_wait))


_SHARE = 0.25  # of the time there is; a scheduler that has not answered by then needs the rest for the requeue
_STALE = 5.0  # seconds after which the scheduler is queried anew before a requeue
_EARLY = 60.0  # seconds for an answer before any signal
_AGAIN = 2.0  # seconds for that; it has answered before


class Question:
    """Queries the scheduler in a thread, from `start` on; on rank 0, or the rank that leads instead of it.

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
        """Sends the query, once."""
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
