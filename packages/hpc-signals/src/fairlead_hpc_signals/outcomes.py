"""Why a run stops, and how that ends: whether another start is wanted, and the exit code that says so."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final, NoReturn

from fairlead.facts import StopReason
from fairlead_runs.describe import NO_CHECKPOINT
from fairlead_runs.exit_codes import ExitCode

REQUEUE_EXIT_CODE: Final = int(ExitCode.AGAIN)
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
        grace_s: Seconds from the signal to the end, into which all of a stop must fit; None: what the scheduler says,
            else 30 after SIGTERM in a job of a scheduler (see `Deadline`).
        save_timeout_s: The most seconds that a stop may take, also where nothing says when it must be over.
        finish_timeout_s: Seconds that all ranks may take to close their loggers.
        requeue_timeout_s: Seconds that the others wait for the rank that requeues.
    """

    auto_requeue: bool = True
    final_code: int | None = None
    requeue_unknown: bool = True
    ask_timeout_s: float = ASK_TIMEOUT
    limit_window_s: float = LIMIT_WINDOW
    short_s: float = 30.0
    grace_s: float | None = None
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
        error: Why another start could not be arranged though it is wanted, or not prevented though it is not.
        cut: What was left out, as time was short.
        refused: Why no other start is wanted though the reason alone would want one: a budget is used up.
        unsaved: Why nothing was saved at this stop: the next start resumes from the checkpoint before.
        without: Ranks that the others did not wait for.
        requested: Who requested that the job stop and not restart.
    """

    exit_code: int
    reason: StopReason
    start_wanted: bool
    requeued: str | None = None
    error: str | None = None
    cut: tuple[str, ...] = ()
    refused: str | None = None
    unsaved: str | None = None
    without: tuple[int, ...] = ()
    requested: str | None = None

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
        lists = {name: tuple(data[name]) for name in ("cut", "without")}
        return cls(**{**data, "reason": StopReason(**data["reason"]), **lists})

    def summary(
        self,
        saved: str = "everything is saved",
        where: str = "",
        earlier: str | None = "The newest complete checkpoint counts",
    ) -> str:
        """The stop as a person reads it.

        Args:
            saved: What to say where all was saved.
            where: Where it stopped.
            earlier: Which checkpoint counts where nothing could be saved, as a sentence without its full stop; None:
                there is none.
        """
        outcome_text = saved
        if self.unsaved is not None:
            outcome_text = f"not saved there: {self.unsaved}. {earlier or NO_CHECKPOINT}"
        because = f"as {self.requested}" if self.requested else _BECAUSE.get(self.reason.why, "on request")
        stopped = f"stopped{where}, {because}; {outcome_text}"
        if self.error:
            restart = "The job does not restart by itself" if self.start_wanted else "It restarts all the same"
            return f"{stopped}. {restart}:\n{self.error}"
        if self.refused:
            return f"{stopped}. The job is not restarted: {self.refused}"
        if self.reason.scheduler_requeues:
            return f"{stopped}; the scheduler restarts the job by itself"
        if self.requeued:
            return f"{stopped}; the job restarts ({self.requeued})"
        if self.start_wanted:
            return f"{stopped}; exit code {self.exit_code} requests a restart"
        if self.unsaved is not None and earlier is None:
            return stopped
        return f"{stopped}; the same command resumes from there"


_BECAUSE: Final[Mapping[str, str]] = {
    "preempted": "as another job needs the nodes",
    "time_limit": "as the time limit is near",
    "cancelled": "as the job was cancelled",
    "node_failure": "as a node failed",
    "requeued": "as the job was requeued",
}


def planned(
    reason: StopReason,
    signals: Sequence[str],
    policy: StopPolicy,
    budget: Callable[[StopReason], str | None] | None,
    requeue_code: int | None,
    final: str | None = None,
) -> StopOutcome:
    """What is to follow from a reason; `budget` says why no other start is wanted, `requeue_code` is that of 75.

    `final` is who requested that the job not restart, whatever the reason.
    """
    if final is not None:
        reason = replace(reason, why="cancelled", evidence=f"{final}; {reason.evidence}")
    wanted = start_wanted(reason, signals, policy)
    refused = budget(reason) if wanted and budget is not None else None
    wanted = wanted and refused is None
    end = policy.final_code or exit_code_without_requeue(signals)
    code = (requeue_code or REQUEUE_EXIT_CODE) if wanted else end
    return StopOutcome(code, reason, wanted, refused=refused, requested=final)


def start_wanted(reason: StopReason, signals: Sequence[str], policy: StopPolicy) -> bool:
    """Whether the job is to be restarted; never after a cancellation or an interrupt from the keyboard."""
    if not policy.auto_requeue or reason.why == "cancelled" or set(signals) == {"SIGINT"}:
        return False
    return policy.requeue_unknown if reason.why == "unknown" else True


def exit_code_without_requeue(signals: Sequence[str]) -> int:
    """130 after an interrupt from the keyboard alone, else 143, as a shell would say it."""
    return int(ExitCode.INTERRUPTED if set(signals) == {"SIGINT"} else ExitCode.STOPPED)


def to_stderr(text: str) -> None:
    """Tells a person; where that cannot be written, the stop is more important."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
