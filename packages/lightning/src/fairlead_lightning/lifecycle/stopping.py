"""How a fit that has left Lightning's loops for a stop ends."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fairlead.interfaces import BuildContext
from fairlead_distributed.alarms import to_stderr
from fairlead_distributed.run.commits import copies_of
from fairlead_distributed.run.ending import Ending
from fairlead_distributed.run.session import RunSession
from fairlead_lightning import compat
from fairlead_lightning.loggers.preempting import mark_preempting
from fairlead_runs.checkpoint_io import CheckpointCopies
from fairlead_runs.guard import StopGuard, StopSignals


class StopRequested(SIGTERMException):
    """Leaves Lightning's loops at a step where all ranks agreed to stop; the process ends with its `code`.

    `failure` is why this rank could not save there; `outcome` is the guard's, None of a stop that was not carried out,
    of which `kept` says what is left.
    """

    def __init__(self, code: int = 143, kept: str = "nothing was written") -> None:
        super().__init__(code)
        self.exit_code = code
        self.kept = kept
        self.failure: Exception | None = None
        self.outcome: Any = None


@compat.only_its_own_batch_hooks
class StopEvaluation(L.Callback):
    """Ends a validation, test or prediction after the batch in which a signal came; predictions until then are kept."""

    def __init__(self, flags: StopSignals) -> None:
        self._flags = flags

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Keeps Lightning's own handlers away: theirs starts a collective wherever the rank is."""
        compat.without_signal_handlers(trainer)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Between two batches."""
        self._stop("nothing was written")

    on_test_batch_end = on_validation_batch_end

    def on_predict_batch_end(self, *_: Any, **__: Any) -> None:
        """Between two batches."""
        self._stop("the predictions so far are kept: run it again with the same folder, and it resumes")

    def _stop(self, kept: str) -> None:
        if self._flags.raised:
            code = 128 + (signal.SIGINT if set(self._flags.counts) == {"SIGINT"} else signal.SIGTERM)
            raise StopRequested(code, kept)


class FitEnding(Ending):
    """How one fit of a Trainer ends for a stop."""

    def __init__(
        self,
        trainer: L.Trainer,
        session: RunSession,
        guard: StopGuard,
        context: BuildContext,
        *,
        step: Callable[[], int],
        saves: bool,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(session, guard, context, rank=trainer.global_rank, step=step, saves=saves, say=say)
        self._trainer = trainer

    def batches_done(self) -> object:
        """Batches of training and of validation, or that it is in the sanity check."""
        loop = self._trainer.fit_loop.epoch_loop
        validated = loop.val_loop.batch_progress.total.ready
        return loop.batch_progress.total.ready, validated, self._trainer.sanity_checking

    def copies(self) -> CheckpointCopies | None:
        """The strategy's backend, where it copies."""
        return copies_of(self._trainer.strategy.checkpoint_io)

    def mark_preempting(self) -> None:
        """Tells the loggers of a service that the job will be started again."""
        mark_preempting(self._trainer.loggers)

    def close_loggers(self, status: str) -> None:
        """Finalizes the loggers, which Lightning would otherwise do once more, as failed."""
        trainer = self._trainer
        loggers, trainer.loggers = trainer.loggers, []
        for logger in loggers:
            try:
                logger.finalize(status)
            except Exception as error:
                to_stderr(f"{type(logger).__name__} could not be closed: {type(error).__name__}: {error}")

    def end(self, requested: StopRequested) -> None:
        """Carries the stop out, once Lightning has left its loops."""
        outcome = self.carry_out(requested.failure)
        requested.code = requested.exit_code = outcome.exit_code
        requested.outcome = outcome
        compat.let_children_end(self._trainer)
