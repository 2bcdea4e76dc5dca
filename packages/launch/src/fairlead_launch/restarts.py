"""Restarts the ranks after a failure, from the newest checkpoint of their run, as long as that helps."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from fairlead.errors import RunFailedError
from fairlead_launch.supervise import Group
from fairlead_launch.verdict import SAVED
from fairlead_runs import read_heartbeats

_SAME: Final = 3
"""How often the same failure at the same step is met before it is believed."""


def run_with_restarts(
    make: Callable[[int, Group | None], Group], received: list[int], *, restarts: Restarts, stderr: IO[str]
) -> int:
    """Runs group after group until one ends well, or another would not; returns the exit code of the last one.

    After a stop signal to this process there is no further start.

    Args:
        make: Makes the group of a start, by how many there were before, and the one before.
        received: The signals that have come, and will (`noted_signals`).
        restarts: How often there is another start.
        stderr: Where restarts are reported.

    Raises:
        RunFailedError: The last failure, with how often it was tried.
    """
    group, starts = None, 0
    while True:
        group = make(starts, group)
        starts += 1
        error: RunFailedError | None = None
        try:
            code = group.supervise(received)
            if code != SAVED or group.stop is not None:
                return code
        except RunFailedError as failure:
            error = failure
        if received or group.stop is not None:
            if error is None:
                return SAVED
            raise error
        message = restarts.after(error, last_step(group))
        if message is None:
            return SAVED
        print(message, file=stderr, flush=True)


class Restarts:
    """How often a job is restarted: a budget of failures, and how often the same failure is retried.

    Ranks that have saved and want another start use up none of it, if they have come further than the ones before.

    Args:
        max_restarts: How many failures are followed by another start.
        when_saved: Whether ranks that have saved and want another start get it here. In a scheduler's job they do not:
            they have requested it from the scheduler, or their exit code does.
    """

    def __init__(self, max_restarts: int, *, when_saved: bool) -> None:
        self._max, self._when_saved = max_restarts, when_saved
        self._failures, self._furthest = 0, -1
        self._seen = Counter[tuple[object, ...]]()

    def after(self, error: RunFailedError | None, step: int | None) -> str | None:
        """What to say of another start, after a failure or (None) a stop for it, at a step; None: there is none.

        `RunFailedError`: after this failure there is no other start.
        """
        if error is None and not self._when_saved:
            return None
        progressed = step is not None and step > self._furthest
        self._furthest = max(self._furthest, step if step is not None else -1)
        if error is not None:
            self._failures += 1
            same = (re.sub(r"\brank \d+", "a rank", error.what), (error.why or "").rpartition("\n")[2], step)
            self._seen[same] += 1
            if self._max and self._seen[same] >= _SAME:
                at = f" at step {step}" if step is not None else ""
                raise _with_reason(
                    error, f"the same failure {self._seen[same]} times{at}: another restart would not help"
                )
        elif not progressed:
            self._failures += 1
        if self._failures > self._max:
            if error is None:
                return None
            raise (
                _with_reason(error, f"restarted {self._max} times, the limit of --max-restarts") if self._max else error
            )
        message = f"failed: {error.block()}" if error is not None else "the ranks have saved and request a restart"
        count = f" ({self._failures} of {self._max})" if self._failures else ""
        return f"{message}\nrestarting the ranks{count}"


def last_step(group: Group) -> int | None:
    """The last training step of a group, None where it had no run, or did not train."""
    if group.run is None:
        return None
    beats = read_heartbeats(Path(group.run.run, "heartbeats"))
    return max((beat.step for beat in beats if beat.start == group.run.start), default=None)


def _with_reason(error: RunFailedError, more: str) -> RunFailedError:
    fix = more if error.fix is None else f"{more}\n{error.fix}"
    return RunFailedError(error.what, where=error.where, why=error.why, fix=fix)


def stopped_before(received: list[int], stderr: IO[str]) -> int:
    """The exit code of what a signal has ended before its ranks were started."""
    first = next((number for number in received if number in (signal.SIGTERM, signal.SIGINT)), received[0])
    print(f"stopped by {signal.Signals(first).name} before it began; nothing was lost", file=stderr, flush=True)
    return 128 + first
