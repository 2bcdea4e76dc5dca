"""The last minutes of a run: what each rank does between the checkpoint and the exit, and what rank 0 alone does."""

from __future__ import annotations

import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from fairlead.errors import FairleadError, RunFailedError
from fairlead.interfaces import Requeuer
from fairlead_hpc_signals.channel import Channel
from fairlead_hpc_signals.outcomes import (
    REQUEUE_EXIT_CODE,
    StopOutcome,
    StopPolicy,
    exit_code_without_requeue,
    start_wanted,
)
from fairlead_hpc_signals.reasons import StopReason

__all__ = ["Leaving"]

_STALE: Final = 5.0  # seconds after which the scheduler is asked again before a requeue
_TOGETHER: Final = 5.0  # seconds that ranks wait for each other at the very end


class Leaving:
    """One rank's part in leaving; the three steps are taken by all ranks, in order.

    Args:
        channel: The other ranks; None for a process alone.
        policy: How long each part may take.
        signals: What came to any rank: the same on all ranks.
        question: Asks the scheduler; called on the leading rank only.
        budget: Says why no other start is wanted after a reason, or None; called on the leading rank only.
    """

    def __init__(
        self,
        channel: Channel | None,
        policy: StopPolicy,
        signals: Sequence[str],
        question: Callable[[], StopReason],
        budget: Callable[[StopReason], str | None] | None = None,
    ) -> None:
        self.channel = channel
        self.policy = policy
        self.leads = channel is None or channel.rank == 0
        self._signals = signals
        self._question = question
        self._budget = budget
        self._reason = StopReason("unknown", "the scheduler did not answer in time")
        self._asked_at = time.monotonic()
        self._code: int | None = None
        self._asking: threading.Thread | None = None
        if self.leads:
            # While the checkpoint is written; a scheduler that hangs must not hold it up.
            self._asking = threading.Thread(target=self._ask, name="fairlead-ask", daemon=True)
            self._asking.start()

    def plan(self, error: BaseException | None, code: int | None) -> StopOutcome:
        """What is to come, once all ranks have saved.

        Args:
            error: Why this rank could not save.
            code: The exit code that asks for another start, where the requeuer has one of its own.

        Raises:
            RunFailedError: Another rank could not save.
        """
        self._code = code
        problem = "" if error is None else f"{type(error).__name__}: {error}"
        failure = ""
        if self.channel is not None:
            self.channel.arrive("leave/saved", problem)
            failure = self._failure(self.channel, problem) if self.leads else ""
        if self.leads:
            plan = self._plan()
            if self.channel is not None:
                self.channel.store.set("leave/plan", failure or plan.to_json())
        elif error is None:
            assert self.channel is not None
            patience = self.policy.save_timeout_s + self.policy.ask_timeout_s + self.policy.finish_timeout_s
            told = self._hear("leave/plan", patience) or f"rank 0 said nothing within {patience:g} s"
            failure, plan = ("", StopOutcome.from_json(told)) if told.startswith("{") else (told, self._plan())
        else:
            plan = self._plan()
        if failure and error is None:
            raise RunFailedError(
                "the run stopped without a checkpoint, and is not started again",
                where="the last save",
                why=failure,
                fix="start it again by hand; it goes on from the checkpoint before",
            )
        return plan

    def finish(self, plan: StopOutcome, finish: Callable[[StopReason], object] | None) -> None:
        """Lets each rank close what it has open, unless time is short; no rank is left behind in it.

        What `finish` raises is a warning: everything is saved, and the job must start again all the same.
        """
        if finish is None or "finish" in plan.cut:
            return
        try:
            finish(plan.reason)
        except Exception as error:
            told = "".join(traceback.format_exception(error))
            warnings.warn(f"something could not be closed before the stop: {told}", stacklevel=3)
        if self.channel is not None:
            self.channel.arrive("leave/finished", "")
        if self.channel is not None and self.leads:
            self.channel.wait("leave/finished/all", self.policy.finish_timeout_s)

    def requeue(self, plan: StopOutcome, requeuer: Requeuer | None) -> StopOutcome:
        """Has the job started again, on rank 0; the outcome for all."""
        outcome = plan
        if self.leads:
            outcome = self._requeued(plan, requeuer)
            if self.channel is not None:
                self.channel.store.set("leave/outcome", outcome.to_json())
        elif told := self._hear("leave/outcome", self.policy.requeue_timeout_s):
            outcome = StopOutcome.from_json(told)
        self._together()
        return outcome

    # -- rank 0

    def _ask(self) -> None:
        self._reason = self._question()

    def _failure(self, channel: Channel, own: str) -> str:
        if own:
            return f"rank 0: {own}"
        if not channel.wait("leave/saved/all", self.policy.save_timeout_s):
            missing = ", ".join(map(str, channel.missing("leave/saved")))
            return f"rank {missing} did not save within {self.policy.save_timeout_s:g} s"
        return "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(channel.arrived("leave/saved")) if text)

    def _plan(self) -> StopOutcome:
        if self._asking is not None:
            self._asking.join(self.policy.ask_timeout_s)
        reason = self._reason
        short = reason.remaining_s is not None and reason.remaining_s - self._age() < self.policy.short_s
        return self._outcome(reason, ("finish",) if short else ())

    def _outcome(self, reason: StopReason, cut: tuple[str, ...]) -> StopOutcome:
        wanted = start_wanted(reason, self._signals, self.policy)
        refused = self._budget(reason) if wanted and self._budget is not None else None
        wanted = wanted and refused is None
        final = self.policy.final_code or exit_code_without_requeue(self._signals)
        code = (self._code or REQUEUE_EXIT_CODE) if wanted else final
        return StopOutcome(code, reason, wanted, cut=cut, refused=refused)

    def _requeued(self, plan: StopOutcome, requeuer: Requeuer | None) -> StopOutcome:
        if plan.start_wanted and not plan.cut and self._age() > _STALE:
            # A person may have cancelled the job while it was saving, or SLURM requeued it.
            now = self._question()
            if now.why != "unknown":
                plan = self._outcome(now, plan.cut)
        if requeuer is None or not plan.start_wanted or plan.reason.scheduler_requeues:
            return plan
        try:
            return replace(plan, requeued=requeuer.requeue())
        except FairleadError as error:
            return replace(plan, error=error.block())

    def _age(self) -> float:
        return time.monotonic() - self._asked_at

    # -- the others

    def _hear(self, key: str, seconds: float) -> str:
        assert self.channel is not None
        return self.channel.store.get(key).decode() if self.channel.wait(key, seconds) else ""

    def _together(self) -> None:
        """A launcher may kill those that are slower than the first to end; and rank 0 may host the store."""
        if self.channel is None:
            return
        try:
            self.channel.arrive("leave/gone", "")
            self.channel.wait("leave/gone/all", _TOGETHER)
        except RuntimeError:
            return  # the store has gone: the others have left
