"""Why a run stops, and how that ends: whether another start is wanted, and the exit code that says so."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, NoReturn

from fairlead.facts import StopReason

REQUEUE_EXIT_CODE: Final = 75
"""Stopped with everything saved, and another start is wanted (EX_TEMPFAIL)."""

ASK_TIMEOUT: Final = 10.0
"""Seconds that the scheduler may take to answer."""
LIMIT_WINDOW: Final = 600.0
"""Seconds before its end in which a running job that was signalled is taken to be near its time limit."""


@dataclass(frozen=True, slots=True)
class StopPolicy:
    """What to do about a stop, and how long each part of it may take.

    Args:
        auto_requeue: Whether another start may be arranged at all. False means it.
        final_code: The exit code when no other start is wanted; None: 143, or 130 after Ctrl-C.
        requeue_unknown: Whether it is arranged when the scheduler does not say why the signal came. It then mostly is
            a person's `scancel -s USR1`, a warning from the batch script, or a container without `scontrol`.
        ask_timeout_s: Seconds that the scheduler may take to answer.
        limit_window_s: See `LIMIT_WINDOW`.
        short_s: With fewer seconds left, only the checkpoint and the requeue are done.
        save_timeout_s: Seconds that all ranks may take to save; the scheduler's patience is mostly shorter.
        finish_timeout_s: Seconds that all ranks may take to close their loggers.
        requeue_timeout_s: Seconds that the others wait for the rank that requeues.
    """

    auto_requeue: bool = True
    final_code: int | None = None
    requeue_unknown: bool = True
    ask_timeout_s: float = ASK_TIMEOUT
    limit_window_s: float = LIMIT_WINDOW
    short_s: float = 30.0
    save_timeout_s: float = 1800.0
    finish_timeout_s: float = 30.0
    requeue_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class StopOutcome:
    """How a stop ended; the same on all ranks.

    Args:
        exit_code: What all ranks are to end with: 75 (or the requeuer's own code) when another start is wanted; 143 or
            130 when none is.
        reason: Why the job was stopped.
        start_wanted: Whether another start is wanted.
        requeued: What was done for it; None when nothing was, because none is wanted, it was done already, or it
            failed.
        error: Why another start could not be arranged though it is wanted.
        cut: What was left out, as time was short.
        refused: Why no other start is wanted though the reason alone would want one: a budget is used up.
    """

    exit_code: int
    reason: StopReason
    start_wanted: bool
    requeued: str | None = None
    error: str | None = None
    cut: tuple[str, ...] = ()
    refused: str | None = None

    def exit(self) -> NoReturn:
        """Ends the process with the exit code."""
        raise SystemExit(self.exit_code)

    def to_json(self) -> str:
        """As text, for the store and the history."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StopOutcome:
        """From `to_json`."""
        data = json.loads(text)  # not by pydantic, which refuses a path that is no valid Unicode
        return cls(**{**data, "reason": StopReason(**data["reason"]), "cut": tuple(data["cut"])})


def start_wanted(reason: StopReason, signals: Sequence[str], policy: StopPolicy) -> bool:
    """Whether the job is to start again; never after a cancellation or an interrupt from the keyboard."""
    if not policy.auto_requeue or reason.why == "cancelled" or set(signals) == {"SIGINT"}:
        return False
    return policy.requeue_unknown if reason.why == "unknown" else True


def exit_code_without_requeue(signals: Sequence[str]) -> int:
    """130 after an interrupt from the keyboard alone, else 143, as a shell would say it."""
    return 128 + (signal.SIGINT if set(signals) == {"SIGINT"} else signal.SIGTERM)
