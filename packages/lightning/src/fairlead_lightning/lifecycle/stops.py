"""A fit stops when its scheduler wants it: the adapter of a `StopGuard` to Lightning's loops."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import lightning.pytorch as L
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from fairlead.bases import RequeueConfigBase
from fairlead.detect import find_job
from fairlead.interfaces import BuildContext, OutlivesStops, Requeuer, StopGuard, Stopped, StopSignals
from fairlead.plugins import default_plugins
from fairlead_distributed.run.session import RunSession
from fairlead_lightning import compat
from fairlead_lightning.build import build_backend, build_guard
from fairlead_lightning.checkpoint.committing import copies_of
from fairlead_lightning.resume.exact_resume import Saves
from fairlead_lightning.resume.loaders import CarriedLoader
from fairlead_runs import read_history, refusal, spent

__all__ = ["StopEvaluation", "StopRequested", "Stops"]

_WARNINGS: Final = ("SIGUSR1", "SIGUSR2")  # what a scheduler is asked to send ahead; by default it ends a process


class StopRequested(SIGTERMException):
    """Leaves Lightning's loops at a step where all ranks agreed to stop; the process ends with its `code`."""

    def __init__(self, code: int = 143) -> None:
        super().__init__(code)
        self.exit_code = code
        self.outcome: Stopped | None = None
        """How the stop ended; None of one that was never carried out."""


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
        self._lacking: str | None = None
        self._reason: Any = None
        self._step = -1
        self._undo: Callable[[], None] | None = None
        self._closing: threading.Event | None = None
        self._even = True

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
            self._made().flags.install(_WARNINGS)

    def begin(self, session: RunSession) -> None:
        """A fit begins, in this process or in ranks that it spawns; data are not prepared yet."""
        self.session = session
        guard = self._made()
        if not self._given:
            if threading.current_thread() is not threading.main_thread():
                self._say(
                    "warning[signals-unheard]: the training is not in the main thread, where alone Python can handle "
                    "signals: make a PreemptionGuard there and pass it on, `guard=guard`"
                )
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

    def _made(self) -> StopGuard:
        if self.guard is None:
            self.guard = build_guard(self._config, self._context, self._flags)
            self._flags = self.guard.flags
            self._failure, self._lacking, self._recorded, self._step, self._even = None, None, False, -1, True
        return self.guard

    def pass_on(self, trainer: L.Trainer) -> None:
        """Has the ranks that this process spawns get the signals that it gets: it only waits for them."""
        guard = self._made()
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
        guard = self._made()
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
            text = f"{conflict.signal} is handled by {conflict.handler} now: it will not stop this run in time"
            self.session.event("signal-handler-replaced", signal=conflict.signal, handler=conflict.handler)
            if trainer.is_global_zero:
                self._say(f"warning[signal-handler-replaced]: {text}; install that handler before the fit begins")

    def keep_workers(self, loader: object) -> None:
        """A scheduler signals the workers of a loader too; the fit would die of a worker that does."""
        inner = loader.loader if isinstance(loader, CarriedLoader) else loader
        if self.guard is None or not isinstance(inner, DataLoader) or not inner.num_workers:
            return
        theirs = inner.worker_init_fn
        if isinstance(theirs, _InWorker):  # of an earlier fit
            theirs = theirs.theirs
        outlive = self.guard.in_worker
        inner.worker_init_fn = _InWorker(outlive, theirs)
        vars(inner)["_get_iterator"] = partial(_start_workers, inner, outlive)

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
        self._even = trainer.strategy.reduce_boolean_decision(same)

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        """In the middle of a validation, or of the sanity check."""
        if self._even:
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
        except Exception as error:  # told to the other ranks below, when Lightning has left its loops
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
            requeuer = _Recorded(build_backend(self._config, self._context), self._record_requeue)
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
            self._say(self._told(outcome))

    def _saved(self, trainer: L.Trainer) -> None:
        if self._failure is not None:
            raise self._failure
        copies = copies_of(trainer.strategy.checkpoint_io) if trainer.is_global_zero else None
        if copies is None:
            return
        assert self.guard is not None
        since = getattr(self.guard.decision, "time", None)
        gone = max(0.0, time.time() - since) if since is not None else 0.0
        self._lacking = copies.settle(max(0.0, copies.stop_wait_s - gone))
        if self._lacking is not None and self.session is not None:
            self.session.event("upload-unfinished", step=self._step, why=self._lacking)

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
        counts = spent(read_history(self.session.path / "history.jsonl"))
        self.session.event(
            "stop",
            step=self._step,
            reason=reason.why,
            evidence=reason.evidence,
            by_scheduler=reason.scheduler_requeues,
            stops_before=dict(counts.stops or {}),
            failures_before=counts.failures,
        )

    def _told(self, outcome: Stopped) -> str:
        why = _SENTENCES.get(outcome.reason.why, "asked to stop")
        assert self.session is not None
        saved = "everything is saved" if self.saves is not None else "no checkpoint was asked for"
        if self._lacking is not None:
            saved += f" in {self.session.path}, where the next start must find it: {self._lacking}"
        begin = f"stopped at step {self._step}, {why}; {saved}"
        if outcome.error:
            return f"{begin}. The job does not start again by itself:\n{outcome.error}"
        if outcome.refused:
            return f"{begin}. The job is not started again: {outcome.refused}"
        if outcome.reason.scheduler_requeues:
            return f"{begin}; the scheduler starts the job again by itself"
        if outcome.requeued:
            return f"{begin}; the job starts again ({outcome.requeued})"
        if outcome.start_wanted:
            return f"{begin}; exit code {outcome.exit_code} asks for another start"
        return f"{begin}; the same command goes on from there"


def _close(trainer: L.Trainer, status: str) -> None:
    """Finalizes the loggers, which Lightning would otherwise do once more, as failed."""
    loggers, trainer.loggers = trainer.loggers, []
    for logger in loggers:
        logger.finalize(status)


_SENTENCES: Final[Mapping[str, str]] = {
    "preempted": "as another job needs the nodes",
    "time_limit": "as the time limit is near",
    "cancelled": "as the job was cancelled",
    "node_failure": "as a node failed",
    "requeued": "as somebody has requeued the job",
}


def _start_workers(loader: DataLoader[Any], outlive: OutlivesStops) -> Any:
    """In place of a loader's `_get_iterator`: there is no public place around the start of its workers."""
    with outlive.held():
        return type(loader)._get_iterator(loader)


class _InWorker:
    """What a loader calls in each worker: ours, and then what the user asked for."""

    def __init__(self, ours: Callable[[int], None], theirs: Callable[[int], None] | None) -> None:
        self.ours = ours
        self.theirs = theirs

    def __call__(self, worker: int) -> None:
        self.ours(worker)
        if self.theirs is not None:
            self.theirs(worker)


class _Recorded:
    """A requeuer that first has the history written: the scheduler may end the job in its call."""

    def __init__(self, requeuer: Requeuer, record: Callable[[], None]) -> None:
        self._requeuer = requeuer
        self._record = record
        if (code := getattr(requeuer, "exit_code", None)) is not None:
            self.exit_code = code

    def requeue(self) -> str:
        self._record()
        return self._requeuer.requeue()


@compat.only_its_own_batch_hooks
class StopEvaluation(L.Callback):
    """Ends a validation, test or prediction after the batch in which a signal came; nothing of it is kept.

    Args:
        flags: The signals of this process.
    """

    def __init__(self, flags: StopSignals) -> None:
        self._flags = flags

    def attach(self, trainer: L.Trainer) -> None:
        """Keeps Lightning's own handlers away: theirs starts a collective wherever the rank is."""
        compat.without_signal_handlers(trainer)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Between two batches."""
        self._look()

    def on_test_batch_end(self, *_: Any, **__: Any) -> None:
        """Between two batches."""
        self._look()

    def on_predict_batch_end(self, *_: Any, **__: Any) -> None:
        """Between two batches."""
        self._look()

    def _look(self) -> None:
        if self._flags.raised:
            raise StopRequested(128 + (signal.SIGINT if set(self._flags.counts) == {"SIGINT"} else signal.SIGTERM))
