"""A fit stops when its scheduler wants it: the adapter of a `StopGuard` to Lightning's loops."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import lightning.pytorch as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fairlead.config_bases import RequeueConfigBase
from fairlead.detect import find_job
from fairlead.findings import Finding
from fairlead.interfaces import BuildContext, Requeuer, StopGuard
from fairlead.plugins import default_plugins
from fairlead_distributed.run.session import RunSession
from fairlead_lightning import compat
from fairlead_lightning.build import build_backend, build_guard
from fairlead_lightning.checkpoint.committing import copies_of
from fairlead_lightning.lifecycle.loader_workers import protect_workers
from fairlead_lightning.lifecycle.stop_summary import stop_summary
from fairlead_lightning.resume.exact_resume import Saves
from fairlead_runs import count_starts, read_history, refusal

__all__ = ["StopRequested", "Stops"]

_WARNINGS: Final = ("SIGUSR1", "SIGUSR2")  # what a scheduler is asked to send ahead; by default it ends a process


class StopRequested(SIGTERMException):
    """Leaves Lightning's loops at a step where all ranks agreed to stop; the process ends with its `code`."""

    def __init__(self, code: int = 143) -> None:
        super().__init__(code)
        self.exit_code = code
        self.outcome: Any = None
        """How the stop ended, the guard's outcome; None of one that was never carried out."""


@compat.only_its_own_batch_hooks
class Stops(L.Callback):
    """Has all ranks stop at the same step, saves there, and has the job started again.

    The ranks may stop between two optimizer steps, between two epochs, at each batch of a validation that has as many
    on all ranks, and wherever a fit begins. What is saved then is the state at the last step: a validation that was
    cut is done again from its start.

    Args:
        config: The requeuer's.
        context: What it is built with.
        say: Tells the user, on the first rank.
        guard: One with handlers that were installed before, as by a main thread that trains in another.
    """

    def __init__(
        self,
        config: RequeueConfigBase,
        context: BuildContext,
        say: Callable[[str], None],
        guard: StopGuard | None = None,
    ) -> None:
        self.session: RunSession | None = None
        """The run of this fit; None: no stop is looked for."""
        self.saves: Saves | None = None
        self.guard = guard
        self._config = config
        self._context = context
        self._say = say
        self._flags = guard.flags if guard is not None else None
        self._given = guard is not None
        self._failure: Exception | None = None
        self._recorded = False
        self._not_uploaded: str | None = None
        self._reason: Any = None
        self._step = -1
        self._undo: Callable[[], None] | None = None
        self._closing: threading.Event | None = None
        self._equal_validation = True

    def __getstate__(self) -> dict[str, Any]:
        """Spawned ranks have handlers of their own, and no plugin manager."""
        gone = {"guard": None, "_flags": None, "_given": False, "_undo": None, "_closing": None}
        context = BuildContext(self._context.resolution, dict(self._context.environ), None)  # type: ignore[arg-type]
        return {**self.__dict__, **gone, "_context": context}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._context = replace(self._context, plugins=default_plugins())

    # -- around a fit

    def listen_early(self) -> None:
        """Notes the signals that warn of a stop from now on: by default they end a process that only prepares.

        In a job of a scheduler and in the main thread only; elsewhere nobody sends them.
        """
        in_job = find_job(self._context.environ, self._context.plugins) is not None
        if in_job and self._config.name != "none" and threading.current_thread() is threading.main_thread():
            self._ensure_guard().flags.install(_WARNINGS)

    def begin(self, session: RunSession) -> None:
        """A fit begins, in this process or in ranks that it spawns; data are not prepared yet."""
        self.session = session
        guard = self._ensure_guard()
        if not self._given:
            if threading.current_thread() is not threading.main_thread():
                finding = Finding(
                    "warning",
                    "signals-unheard",
                    "a scheduler's signals will not stop this training",
                    why="it is not in the main thread, where alone Python can handle signals",
                    fix="make a PreemptionGuard in the main thread and pass it on: `guard=guard`",
                )
                self._say(str(finding))
            else:
                guard.flags.install()

    def end(self) -> None:
        """The fit is over; after a stop the handlers stay: what follows a requeue must not change the exit code."""
        guard, self.guard, self.session, self.saves = self.guard, None, None, None
        if self._closing is not None:
            self._closing.set()
        if guard is not None:
            guard.close()
            if guard.outcome is None and not self._given:
                guard.flags.uninstall()
                self.listen_early()
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _ensure_guard(self) -> StopGuard:
        if self.guard is None:
            self.guard = build_guard(self._config, self._context, self._flags)
            self._flags = self.guard.flags
            self._failure, self._not_uploaded, self._recorded = None, None, False
            self._step, self._equal_validation = -1, True
        return self.guard

    def pass_on(self, trainer: L.Trainer) -> None:
        """Has the ranks that this process spawns get the signals that it gets: it only waits for them."""
        guard = self._ensure_guard()
        closing = self._closing = threading.Event()

        def run() -> None:
            while not closing.is_set():
                if guard.flags.wait(0.5):
                    for name in guard.flags.counts:
                        compat.signal_children(trainer, name)
                    return

        threading.Thread(target=run, name="fairlead-pass-on", daemon=True).start()

    # -- where all ranks come by equally often

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """The ranks are connected."""
        if self.session is None:
            return
        guard = self._ensure_guard()
        if not self._given and threading.current_thread() is threading.main_thread():
            guard.flags.install()  # a spawned rank has none yet
        self._undo = compat.without_signal_handlers(trainer)
        guard.start()
        self._boundary(trainer)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The model is there, a checkpoint is loaded."""
        self._boundary(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """All libraries had their chance to take the signals over."""
        self._step = trainer.global_step  # known from here on; `after_batch` keeps it
        if self.guard is None or self.session is None:
            return
        for conflict in self.guard.flags.conflicts():
            finding = Finding(
                "warning",
                "signal-handler-replaced",
                f"{conflict.signal} will not stop this run in time",
                why=f"it is handled by {conflict.handler} now",
                fix="install that handler before the fit begins",
            )
            self.session.event(finding.code, signal=conflict.signal, handler=conflict.handler)
            if trainer.is_global_zero:
                self._say(str(finding))

    def keep_workers(self, loader: object) -> None:
        """Has the workers of a loader outlive the signals."""
        if self.guard is not None:
            protect_workers(loader, self.guard.in_worker)

    def before_epoch(self, trainer: L.Trainer) -> None:
        """Nothing of the next epoch has begun."""
        self._boundary(trainer, between_epochs=True)

    def after_batch(self, trainer: L.Trainer) -> None:
        """A batch is done; between the micro-batches of one step nothing can be saved."""
        step = trainer.global_step
        if step != self._step:
            self._step = step
            self._boundary(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Whether the batches of this validation are places where all ranks come by equally often."""
        if self.guard is None:
            return
        batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        same = bool(trainer.strategy.broadcast(batches) == batches) and math.inf not in batches
        self._equal_validation = trainer.strategy.reduce_boolean_decision(same)

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """In the middle of a validation, or of the sanity check."""
        if self._equal_validation:
            self._boundary(trainer)

    def _boundary(self, trainer: L.Trainer, *, between_epochs: bool = False) -> None:
        guard = self.guard
        if guard is None or self.session is None or not guard.should_stop():
            return
        if self._step < 0:  # not restored yet
            self._step = self.session.resume_step or 0
        decision = guard.decision
        self.session.event(
            "signal",
            signals=list(decision.signals),
            ranks=[request.rank for request in decision.requests],
            asked=[request.why for request in decision.requests if request.why],
            step=self._step,
        )
        self.session.beat("stopping", self._step)
        try:
            if self.saves is not None:
                self.saves.save_at_stop(trainer, between_epochs=between_epochs)
        except Exception as error:  # the other ranks learn of it when Lightning has left its loops
            self._failure = error
        requested = StopRequested()
        if compat.is_spawned(trainer):
            # In a spawned rank Lightning calls nobody's `on_exception`.
            self.on_exception(trainer, trainer.lightning_module, requested)
        raise requested

    # -- afterwards

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Lightning has left its loops, and other callbacks have had their say."""
        guard, session = self.guard, self.session
        if not isinstance(exception, StopRequested) or guard is None or session is None:
            return
        requeuer = None
        if trainer.is_global_zero and self._config.name != "none":
            requeuer = _RecordingRequeuer(build_backend(self._config, self._context), self._record_requeue)
        try:
            outcome = guard.save_and_requeue(
                lambda: self._saved(trainer),
                requeuer,
                finish=lambda reason: self._finish(trainer, reason),
                budget=self._budget,
            )
        except Exception as error:
            session.event("failed", rank=trainer.global_rank, step=self._step, error=f"{type(error).__name__}: {error}")
            _close(trainer, "failed")  # Lightning does not come to it
            raise
        self._record_stop(outcome.reason)
        session.beat("stopped", self._step)
        if outcome.refused or outcome.error:
            session.event("requeue-failed", error=outcome.refused or outcome.error)
        exception.code = exception.exit_code = outcome.exit_code
        exception.outcome = outcome
        compat.let_children_end(trainer)
        if trainer.is_global_zero:
            saved = "everything is saved" if self.saves is not None else "no checkpoint was asked for"
            if self._not_uploaded is not None:
                saved += f" in {session.path}, where the next start must find it: {self._not_uploaded}"
            self._say(stop_summary(outcome, self._step, saved))

    def _saved(self, trainer: L.Trainer) -> None:
        if self._failure is not None:
            raise self._failure
        copies = copies_of(trainer.strategy.checkpoint_io) if trainer.is_global_zero else None
        if copies is None:
            return
        assert self.guard is not None
        since = self.guard.decision.time
        elapsed = max(0.0, time.time() - since) if since is not None else 0.0
        self._not_uploaded = copies.wait_uploaded(max(0.0, copies.stop_wait_s - elapsed))
        if self._not_uploaded is not None and self.session is not None:
            self.session.event("upload-unfinished", step=self._step, why=self._not_uploaded)

    def _finish(self, trainer: L.Trainer, reason: Any) -> None:
        self._record_stop(reason)
        _close(trainer, "finished")

    def _budget(self, reason: Any) -> str | None:
        """Why no other start is wanted; the first rank hears the reason here, before anything is requeued."""
        assert self.session is not None
        self._reason = reason
        return refusal(self._config, read_history(self.session.path / "history.jsonl"))

    def _record_requeue(self) -> None:
        """The scheduler may end this process in the requeue: the history has the stop before, also in a hurry."""
        assert self.session is not None
        self._record_stop(self._reason)
        self.session.event("requeue", by=self._config.name, step=self._step)

    def _record_stop(self, reason: Any) -> None:
        assert self.session is not None
        if self._recorded:
            return
        self._recorded = True
        counts = count_starts(read_history(self.session.path / "history.jsonl"))
        self.session.event(
            "stop",
            step=self._step,
            reason=reason.why,
            evidence=reason.evidence,
            by_scheduler=reason.scheduler_requeues,
            stops_before=dict(counts.stops or {}),
            failures_before=counts.failures,
        )


def _close(trainer: L.Trainer, status: str) -> None:
    """Finalizes the loggers, which Lightning would otherwise do once more, as failed."""
    loggers, trainer.loggers = trainer.loggers, []
    for logger in loggers:
        logger.finalize(status)


class _RecordingRequeuer:
    """A requeuer that first has the history written: the scheduler may end the job in its call."""

    def __init__(self, requeuer: Requeuer, record: Callable[[], None]) -> None:
        self._requeuer = requeuer
        self._record = record
        if (code := getattr(requeuer, "exit_code", None)) is not None:
            self.exit_code = code

    def requeue(self) -> str:
        self._record()
        return self._requeuer.requeue()
