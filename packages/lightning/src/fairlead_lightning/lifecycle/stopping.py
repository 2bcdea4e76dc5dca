"""How a fit that has left Lightning's loops for a stop ends: what is saved, recorded, requeued, and told."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import lightning.pytorch as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fairlead.interfaces import BuildContext, Requeuer, StopGuard, StopSignals
from fairlead_distributed.run.session import RunSession
from fairlead_lightning import compat
from fairlead_lightning.build import build_backend
from fairlead_lightning.checkpoint.commits import copies_of
from fairlead_runs import count_starts, read_history, refusal

_BECAUSE: Final[Mapping[str, str]] = {
    "preempted": "as another job needs the nodes",
    "time_limit": "as the time limit is near",
    "cancelled": "as the job was cancelled",
    "node_failure": "as a node failed",
    "requeued": "as somebody has requeued the job",
}


class StopRequested(SIGTERMException):
    """Leaves Lightning's loops at a step where all ranks agreed to stop; the process ends with its `code`.

    `failure` is why this rank could not save there; `outcome` is the guard's, None of a stop that was not carried out.
    """

    def __init__(self, code: int = 143) -> None:
        super().__init__(code)
        self.exit_code = code
        self.failure: Exception | None = None
        self.outcome: Any = None


@compat.only_its_own_batch_hooks
class StopEvaluation(L.Callback):
    """Ends a validation, test or prediction after the batch in which a signal came; nothing of it is kept."""

    def __init__(self, flags: StopSignals) -> None:
        self._flags = flags

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Keeps Lightning's own handlers away: theirs starts a collective wherever the rank is."""
        compat.without_signal_handlers(trainer)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Between two batches."""
        if self._flags.raised:
            raise StopRequested(128 + (signal.SIGINT if set(self._flags.counts) == {"SIGINT"} else signal.SIGTERM))

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end


def carry_out(
    requested: StopRequested,
    trainer: L.Trainer,
    session: RunSession,
    guard: StopGuard,
    step: int,
    context: BuildContext,
    *,
    saves: bool,
) -> str:
    """Ends all ranks together, once Lightning has left its loops; what to tell the user.

    Raises what this rank could not save with, or that another rank could not; nothing was requeued then.
    """
    config, first = context.resolution.requeue, trainer.is_global_zero
    history = session.path / "history.jsonl"
    lacking: list[str] = []
    asked: list[Any] = []
    recorded: list[Any] = []

    def save() -> None:
        # The state was saved where the ranks stopped: here it is waited for, or they learn that it was not.
        if requested.failure is not None:
            raise requested.failure
        copies = copies_of(trainer.strategy.checkpoint_io) if first else None
        if copies is None:
            return
        elapsed = max(0.0, time.time() - guard.decision.time) if guard.decision.time is not None else 0.0
        why = copies.wait_uploaded(max(0.0, copies.stop_wait_s - elapsed))
        if why is not None:
            lacking.append(why)
            session.event("upload-unfinished", step=step, why=why)

    def record(reason: Any) -> None:
        if recorded:
            return
        recorded.append(reason)
        counts = count_starts(read_history(history))
        session.event(
            "stop",
            step=step,
            reason=reason.why,
            evidence=reason.evidence,
            by_scheduler=reason.scheduler_requeues,
            stops_before=dict(counts.stops or {}),
            failures_before=counts.failures,
        )

    def finish(reason: Any) -> None:
        record(reason)
        _close_loggers(trainer, "finished")

    def budget(reason: Any) -> str | None:
        asked.append(reason)  # the first rank hears it here, before anything is requeued
        return refusal(config, read_history(history))

    def before_requeue() -> None:
        # The scheduler may end this process in the requeue: the history has the stop before, also in a hurry.
        record(asked[-1])
        session.event("requeue", by=config.name, step=step)

    requeuer = None
    if first and config.name != "none":
        requeuer = _RecordingRequeuer(build_backend(config, context), before_requeue, context)
    try:
        outcome = guard.save_and_requeue(save, requeuer, finish=finish, budget=budget)
    except Exception as error:
        session.event("failed", rank=trainer.global_rank, step=step, error=f"{type(error).__name__}: {error}")
        _close_loggers(trainer, "failed")  # Lightning does not come to it
        raise
    record(outcome.reason)
    session.beat("stopped", step)
    if outcome.refused or outcome.error:
        session.event("requeue-failed", error=outcome.refused or outcome.error)
    requested.code = requested.exit_code = outcome.exit_code
    requested.outcome = outcome
    compat.let_children_end(trainer)
    saved = "everything is saved" if saves else "no checkpoint was asked for"
    if lacking:
        saved += f" in {session.path}, where the next start must find it: {lacking[0]}"
    return _summary(outcome, step, saved)


def _close_loggers(trainer: L.Trainer, status: str) -> None:
    """Finalizes the loggers, which Lightning would otherwise do once more, as failed."""
    loggers, trainer.loggers = trainer.loggers, []
    for logger in loggers:
        logger.finalize(status)


class _RecordingRequeuer(Requeuer):
    """A requeuer that first has the history written: the scheduler may end the job in its call."""

    def __init__(self, requeuer: Requeuer, record: Callable[[], None], context: BuildContext) -> None:
        super().__init__(context.resolution.requeue, context.environ, context.resolution.job)
        self._requeuer = requeuer
        self._record = record

    @property
    def exit_code(self) -> int | None:
        return self._requeuer.exit_code

    def requeue(self) -> str:
        self._record()
        return self._requeuer.requeue()


def _summary(outcome: Any, step: int, saved: str) -> str:
    because = _BECAUSE.get(outcome.reason.why, "asked to stop")
    stopped = f"stopped at step {step}, {because}; {saved}"
    if outcome.error:
        return f"{stopped}. The job does not start again by itself:\n{outcome.error}"
    if outcome.refused:
        return f"{stopped}. The job is not started again: {outcome.refused}"
    if outcome.reason.scheduler_requeues:
        return f"{stopped}; the scheduler starts the job again by itself"
    if outcome.requeued:
        return f"{stopped}; the job starts again ({outcome.requeued})"
    if outcome.start_wanted:
        return f"{stopped}; exit code {outcome.exit_code} asks for another start"
    return f"{stopped}; the same command resumes from there"
