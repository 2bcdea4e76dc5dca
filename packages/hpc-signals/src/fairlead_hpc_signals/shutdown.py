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
from fairlead.facts import StopReason
from fairlead.interfaces import Requeuer
from fairlead_hpc_signals.outcomes import (
    REQUEUE_EXIT_CODE,
    StopOutcome,
    StopPolicy,
    exit_code_without_requeue,
    start_wanted,
)
from fairlead_runs.mailbox import Mailbox
from fairlead_runs.waiting import ranks_text

_STALE: Final = 5.0  # seconds after which the scheduler is asked again before a requeue
_LEAVE_TIMEOUT: Final = 5.0  # seconds that ranks wait for each other at the very end


class Shutdown:
    """One rank's part in the shutdown after a stop; all ranks call `plan`, `finish` and `requeue`, in this order.

    `signals` are the same on all ranks; `ask_reason` (asks the scheduler) and `budget` (why no other start is wanted
    after a reason, or None) are called on rank 0 only.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        policy: StopPolicy,
        signals: Sequence[str],
        ask_reason: Callable[[], StopReason],
        budget: Callable[[StopReason], str | None] | None = None,
    ) -> None:
        self.leads = mailbox.rank == 0
        self._mailbox = mailbox
        self._policy = policy
        self._signals = signals
        self._ask_reason = ask_reason
        self._budget = budget
        self._reason = StopReason("unknown", "the scheduler did not answer in time")
        self._asked_at = time.monotonic()
        self._requeue_code: int | None = None
        self._asking = threading.Thread(target=self._ask, name="fairlead-ask", daemon=True)
        if self.leads:
            self._asking.start()  # while the checkpoint is written; a scheduler that hangs must not hold it up

    def plan(self, error: BaseException | None, requeue_code: int | None) -> StopOutcome:
        """What is to come, once all ranks have saved; `RunFailedError`: another rank could not.

        `error` says why this rank could not save, and is raised once the others know. `requeue_code` is the exit code
        that asks for another start, where the requeuer has one of its own.
        """
        self._requeue_code = requeue_code
        problem = "" if error is None else f"{type(error).__name__}: {error}"
        message = problem
        self._mailbox.arrive("shutdown/saved", problem)
        if self.leads:
            failed = self._failed_saves(problem)
            outcome = self._plan()
            message = failed or outcome.to_json()
            self._mailbox.put("shutdown/plan", message)
        elif error is None:
            seconds = self._policy.save_timeout_s + self._policy.ask_timeout_s + self._policy.finish_timeout_s
            message = self._mailbox.get("shutdown/plan", seconds) or f"rank 0 said nothing within {seconds:g} s"
        if error is not None:
            raise error
        if not message.startswith("{"):
            raise RunFailedError(
                "the run stopped without a checkpoint, and is not started again",
                where="the last save",
                why=message,
                fix="start it again by hand; it resumes from the checkpoint before",
            )
        return StopOutcome.from_json(message)

    def finish(self, plan: StopOutcome, finish: Callable[[StopReason], object] | None) -> None:
        """Lets each rank close what it has open, unless time is short; what `finish` raises then is a warning only."""
        if finish is None or "finish" in plan.cut:
            return
        try:
            finish(plan.reason)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            warnings.warn(f"something could not be closed before the stop: {text}", stacklevel=3)
        self._mailbox.arrive("shutdown/finished")
        if self.leads:
            self._mailbox.wait("shutdown/finished/all", self._policy.finish_timeout_s)

    def requeue(self, plan: StopOutcome, requeuer: Requeuer | None) -> StopOutcome:
        """Has the job started again, on rank 0; the outcome for all."""
        outcome = plan
        if self.leads:
            outcome = self._requeue(plan, requeuer)
            self._mailbox.put("shutdown/outcome", outcome.to_json())
        elif message := self._mailbox.get("shutdown/outcome", self._policy.requeue_timeout_s):
            outcome = StopOutcome.from_json(message)
        self._leave_together()
        return outcome

    def _leave_together(self) -> None:
        """A launcher may kill those that are slower than the first to end; and rank 0 may host the store."""
        try:
            self._mailbox.arrive("shutdown/leaving")
            self._mailbox.wait("shutdown/leaving/all", _LEAVE_TIMEOUT)
        except RuntimeError:
            return  # the store has gone: the others have left

    # -- rank 0

    def _ask(self) -> None:
        self._reason = self._ask_reason()

    def _failed_saves(self, own_problem: str) -> str:
        if own_problem:
            return f"rank 0: {own_problem}"
        if not self._mailbox.wait("shutdown/saved/all", self._policy.save_timeout_s):
            missing = ranks_text(self._mailbox.missing("shutdown/saved"))
            return f"{missing} did not save within {self._policy.save_timeout_s:g} s"
        problems = self._mailbox.arrived("shutdown/saved")
        return "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)

    def _plan(self) -> StopOutcome:
        self._asking.join(self._policy.ask_timeout_s)
        reason = self._reason
        short = reason.remaining_s is not None and reason.remaining_s - self._age() < self._policy.short_s
        return self._outcome(reason, ("finish",) if short else ())

    def _outcome(self, reason: StopReason, cut: tuple[str, ...]) -> StopOutcome:
        wanted = start_wanted(reason, self._signals, self._policy)
        refused = self._budget(reason) if wanted and self._budget is not None else None
        wanted = wanted and refused is None
        final = self._policy.final_code or exit_code_without_requeue(self._signals)
        code = (self._requeue_code or REQUEUE_EXIT_CODE) if wanted else final
        return StopOutcome(code, reason, wanted, cut=cut, refused=refused)

    def _requeue(self, plan: StopOutcome, requeuer: Requeuer | None) -> StopOutcome:
        if plan.start_wanted and not plan.cut and self._age() > _STALE:
            # A person may have cancelled the job while it was saving, or SLURM requeued it.
            now = self._ask_reason()
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
