"""The last minutes of a run: what each rank does between the checkpoint and the exit, and what rank 0 alone does."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from fairlead.errors import ConfigError, FairleadError, RunFailedError, RunLockedError
from fairlead.facts import StopReason
from fairlead.interfaces import Requeuer
from fairlead_hpc_signals.deadline import Deadline, Question
from fairlead_hpc_signals.outcomes import StopOutcome, StopPolicy, planned
from fairlead_hpc_signals.programs import UnansweredError
from fairlead_runs.mailbox import Mailbox
from fairlead_runs.waiting import ranks_text

_LEAVE_TIMEOUT: Final = 5.0  # seconds that ranks wait for each other at the very end
OUTCOME: Final = "shutdown/outcome"
"""The message with how the stop ended, from the rank that had the job restarted."""
_UNSAVED: Final = (FairleadError, OSError, RuntimeError)  # a disk, or torch's words for one or for a lost peer
_FINAL_ERRORS: Final = (ConfigError, RunLockedError)  # of the user's, or another start has replaced this one
_BUG: Final = "bug: "


class Shutdown:
    """One rank's part in the shutdown after a stop; all ranks call `plan`, `finish` and `requeue`, in this order.

    `signals` and `final` (who requested no other start) are the same on all ranks; `budget` (why no other start is
    wanted after a reason, or None) is called on rank 0 only, which alone queries the scheduler.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        policy: StopPolicy,
        signals: Sequence[str],
        question: Question,
        deadline: Deadline,
        budget: Callable[[StopReason], str | None] | None = None,
        final: str | None = None,
    ) -> None:
        self.leads = mailbox.rank == 0
        self._mailbox = mailbox
        self._policy = policy
        self._signals = signals
        self._question = question
        self._deadline = deadline
        self._budget = budget
        self._final = final
        self._requeue_code: int | None = None
        if self.leads:
            question.start()  # while the checkpoint is written; a scheduler that hangs must not hold it up

    def plan(self, error: BaseException | None, requeue_code: int | None) -> StopOutcome | None:
        """What is to come, once all ranks have saved or no more time is left for it; None: rank 0 did not say.

        `error` says why this rank could not save. One of a disk or of lost peers is part of the plan: the checkpoint
        before counts. Any other is raised, and a `RunFailedError` by the other ranks: a bug would recur forever.
        `requeue_code` is the exit code that asks for another start, where the requeuer has one of its own.
        """
        self._requeue_code = requeue_code
        bug = error is not None and (isinstance(error, _FINAL_ERRORS) or not isinstance(error, _UNSAVED))
        problem = "" if error is None else f"{type(error).__name__}: {error}"
        self._mailbox.arrive("shutdown/saved", f"{_BUG}{problem}" if bug else problem)
        message = self._plan() if self.leads else None
        if error is not None and bug:
            raise error
        if not self.leads:
            message = self._mailbox.get("shutdown/plan", max(1.0, self._deadline.left_to_save()))
        if message is None or message.startswith("{"):
            return None if message is None else StopOutcome.from_json(message)
        raise RunFailedError(
            "the run stopped without a checkpoint, and is not restarted",
            where="the last save",
            why=message,
            fix="restart it by hand; it resumes from the previous checkpoint",
        )

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
            patience = min(self._policy.finish_timeout_s, self._deadline.left_to_save())
            self._mailbox.wait("shutdown/finished/all", max(0.0, patience))

    def requeue(self, plan: StopOutcome, requeuer: Requeuer | None) -> StopOutcome:
        """Has the job restarted, on rank 0; the outcome for all."""
        outcome = plan
        if self.leads and claim_requeue(self._mailbox):
            outcome = self._requeue(plan, requeuer)
            self._mailbox.put(OUTCOME, outcome.to_json())
        elif message := self._mailbox.get(OUTCOME, max(1.0, self._deadline.left(), self._policy.requeue_timeout_s)):
            outcome = StopOutcome.from_json(message)
        if not plan.without:
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

    def _plan(self) -> str:
        missing = self._missing()
        problems = {} if missing else dict(enumerate(self._mailbox.arrived("shutdown/saved")))
        bugs = [f"rank {rank}: {text.removeprefix(_BUG)}" for rank, text in problems.items() if text.startswith(_BUG)]
        if bugs:
            self._mailbox.put("shutdown/plan", "\n".join(bugs))
            return "\n".join(bugs)
        unsaved = "; ".join(f"rank {rank}: {text}" for rank, text in problems.items() if text) or None
        if missing:
            unsaved = f"{ranks_text(missing)} did not say in time that all was saved"
        plan = replace(self._planned(self._question.answer()), unsaved=unsaved, without=missing)
        short = plan.reason.remaining_s is not None and self._deadline.left() < self._policy.short_s
        plan = replace(plan, cut=("finish",) if short or missing else ())
        self._mailbox.put("shutdown/plan", plan.to_json())
        return plan.to_json()

    def _missing(self) -> tuple[int, ...]:
        if self._mailbox.wait("shutdown/saved/all", max(0.0, self._deadline.left_to_save())):
            return ()
        return self._mailbox.missing("shutdown/saved")

    def _planned(self, reason: StopReason) -> StopOutcome:
        return planned(reason, self._signals, self._policy, self._budget, self._requeue_code, self._final)

    def _requeue(self, plan: StopOutcome, requeuer: Requeuer | None) -> StopOutcome:
        if plan.start_wanted and not plan.cut and (now := self._question.answer_now()) is not None:
            plan = replace(self._planned(now), unsaved=plan.unsaved)
        return requeued(plan, requeuer, self._deadline)


def _cancel(requeuer: Requeuer) -> None:
    try:
        requeuer.cancel()
    except FairleadError as error:
        warnings.warn(f"the scheduler will count this stop as a failure: {error.block()}", stacklevel=3)


def claim_requeue(mailbox: Mailbox) -> bool:
    """Whether this rank is the one that has the job restarted: the first rank that claims it."""
    return mailbox.count("shutdown/claimed") == 1


def requeued(plan: StopOutcome, requeuer: Requeuer | None, deadline: Deadline) -> StopOutcome:
    """The outcome, after the job is restarted where that is wanted; a scheduler that hangs is retried to the end.

    A process that ends before would end a job that is not restarted, while SLURM itself requeues a preempted one.
    """
    if requeuer is None or plan.reason.scheduler_requeues:
        return plan
    if not plan.start_wanted:
        if plan.requested is not None:
            _cancel(requeuer)
        return plan
    while True:
        try:
            return replace(plan, requeued=requeuer.requeue())
        except UnansweredError as error:
            if deadline.left() <= 0:
                return replace(plan, error=error.block())
        except FairleadError as error:
            return replace(plan, error=error.block())
