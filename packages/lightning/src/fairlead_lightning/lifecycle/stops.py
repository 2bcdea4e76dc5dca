"""A fit stops when its scheduler wants it: the adapter of a `StopGuard` to Lightning's loops."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import lightning.pytorch as L
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from fairlead.findings import Finding
from fairlead.interfaces import BuildContext
from fairlead.plugins import default_plugins
from fairlead_distributed._sharded import local_part
from fairlead_distributed.alarms import to_stderr
from fairlead_distributed.info import get_world_size
from fairlead_distributed.loader_workers import protect_workers
from fairlead_distributed.run.commits import copies_of
from fairlead_distributed.run.ending import Boundary, Ending
from fairlead_distributed.run.session import RunSession
from fairlead_lightning import compat
from fairlead_lightning.checkpoint.checkpoints import Checkpoints
from fairlead_lightning.loggers.preempting import mark_preempting
from fairlead_lightning.resume.loaders import StatefulLoader
from fairlead_runs.checkpoint_io import CheckpointCopies
from fairlead_runs.guard import StopGuard, StopSignals, build_guard


class StopRequested(SIGTERMException):
    """Leaves Lightning's loops at a step where all ranks agreed to stop; the process ends with its `code`.

    `failure` is why this rank could not save there; `outcome` is the guard's, None of a stop that was not carried out,
    of which `saved` says what is left.
    """

    def __init__(self, code: int = 143, saved: str = "nothing was written") -> None:
        super().__init__(code)
        self.exit_code = code
        self.saved = saved
        self.failure: Exception | None = None
        self.outcome: Any = None


@compat.only_its_own_batch_hooks
class StopEvaluation(L.Callback):
    """Ends a validation, test or prediction after the batch in which a signal came; its predictions are saved."""

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
        self._stop("the predictions so far are saved: run the command again with the same folder to continue")

    def _stop(self, saved: str) -> None:
        if self._flags.raised:
            code = 128 + (signal.SIGINT if set(self._flags.counts) == {"SIGINT"} else signal.SIGTERM)
            raise StopRequested(code, saved)


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
        """Tells the loggers of a service that the job will be restarted."""
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


_WARNINGS: Final = ("SIGUSR1", "SIGUSR2")  # what a scheduler sends before its limit; by default it ends a process


class Stops:
    """Has all ranks stop at the same step, saves there, and has the job restarted.

    They may stop between two steps or epochs, at each batch of a validation that has as many on all ranks and no other
    weights than the training, and where a fit begins. The state at the last step is saved: an interrupted validation is
    repeated from its start.
    """

    def __init__(
        self, context: BuildContext, say: Callable[[str], None] | None = None, guard: StopGuard | None = None
    ) -> None:
        self._context = context
        self._say = say or _say
        self._guard = guard
        self._given = guard is not None
        self._flags = guard.flags if guard is not None else None
        self._session: RunSession | None = None
        self._saves: Checkpoints | None = None
        self._step = -1
        self._boundary: Boundary | None = None
        self._equal_validation = True
        self._norms_before: tuple[Tensor, ...] | None = None  # of a validation, until its first batch has compared them
        self._save_due = False
        self._ending: FitEnding | None = None
        self._undo: list[Callable[[], None]] = []

    def __getstate__(self) -> dict[str, Any]:
        """Spawned ranks install their own handlers, and have no plugin manager."""
        gone: dict[str, Any] = {"_guard": None, "_flags": None, "_given": False, "_undo": []}
        gone |= {"_ending": None, "_boundary": None}
        context = BuildContext(self._context.resolution, dict(self._context.environ), None)  # type: ignore[arg-type]
        return {**self.__dict__, **gone, "_context": context}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._context = replace(self._context, plugins=default_plugins())

    def listen_early(self) -> None:
        """Notes the signals that warn of a stop from now on, in a scheduler's job: by default they end the process."""
        resolution = self._context.resolution
        in_main_thread = threading.current_thread() is threading.main_thread()
        if resolution.job is not None and resolution.requeue.name != "none" and in_main_thread:
            self._ensure_guard().flags.install(_WARNINGS)

    def begin(self, trainer: L.Trainer, session: RunSession, saves: Checkpoints | None, *, here: bool = True) -> None:
        """A fit begins, `here` or in ranks that it spawns; `saves` writes the checkpoint where the ranks stop, if any.

        Where the ranks are connected by now, a stop has to be over in time from here on: data are prepared next.
        """
        self._session, self._saves = session, saves
        self._step, self._equal_validation, self._save_due = -1, True, False
        guard = self._ensure_guard()
        self._boundary = Boundary(session, guard)
        if here and (trainer.world_size == 1 or get_world_size() == trainer.world_size):
            self._prepare(trainer, session)
            guard.start()
        if self._given:
            return
        if threading.current_thread() is threading.main_thread():
            guard.flags.install()
            return
        finding = Finding(
            "warning",
            "signals-unheard",
            "a scheduler's signals will not stop this training",
            why="it is not in the main thread, where alone Python can handle signals",
            fix="make a PreemptionGuard in the main thread and pass it on: `guard=guard`",
        )
        self._say(str(finding))

    def end(self) -> None:
        """The fit is over; after a stop the handlers stay: what follows a requeue must not change the exit code."""
        guard, self._guard, self._session, self._saves = self._guard, None, None, None
        self._ending = self._boundary = None
        for undo in self._undo:
            undo()
        self._undo = []
        if guard is not None:
            guard.close()
            if guard.outcome is None and not self._given:
                guard.flags.uninstall()
                self.listen_early()

    def _ensure_guard(self) -> StopGuard:
        if self._guard is None:
            self._guard = build_guard(self._context, self._flags)
            self._flags = self._guard.flags
        return self._guard

    def pass_on(self, trainer: L.Trainer) -> None:
        """Has the ranks that this process spawns get the signals that it gets: it only waits for them."""
        guard, over = self._ensure_guard(), threading.Event()
        self._undo.append(over.set)

        def run() -> None:
            while not over.is_set():
                if guard.flags.wait(0.5):
                    for name in guard.flags.counts:
                        compat.signal_children(trainer, name)
                    return

        threading.Thread(target=run, name="fairlead-pass-on", daemon=True).start()

    def connected(self, trainer: L.Trainer) -> None:
        """The ranks are connected."""
        guard = self._ensure_guard()
        if not self._given and threading.current_thread() is threading.main_thread():
            guard.flags.install()  # a spawned rank has none yet
        self._undo.append(compat.without_signal_handlers(trainer))
        if self._session is not None and self._ending is None:
            self._boundary = Boundary(self._session, guard)  # a spawned rank has its own guard
            self._prepare(trainer, self._session)
        guard.start()
        if self._session is not None and trainer.world_size in (1, get_world_size()):
            guard.watch_switches(self._session.path, self._session.event)
        self.boundary(trainer)

    def training_starts(self, trainer: L.Trainer) -> None:
        """All libraries had their chance to take the signals over."""
        self._step = trainer.global_step  # known from here on; `after_batch` keeps it
        if self._guard is None or self._session is None:
            return
        for conflict in self._guard.flags.conflicts():
            finding = Finding(
                "warning",
                "signal-handler-replaced",
                f"{conflict.signal} will not stop this run in time",
                why=f"it is handled by {conflict.handler} now",
                fix="install that handler before the fit begins",
            )
            self._session.event(finding.code, signal=conflict.signal, handler=conflict.handler)
            if trainer.is_global_zero:
                self._say(str(finding))

    def _prepare(self, trainer: L.Trainer, session: RunSession) -> None:
        guard = self._ensure_guard()
        self._ending = FitEnding(
            trainer,
            session,
            guard,
            self._context,
            step=lambda: self._step_now,
            saves=self._saves is not None,
            say=self._say,
        )
        self._ending.prepare()

    def keep_workers(self, loader: object) -> None:
        """Has the workers of a loader outlive the signals."""
        if self._guard is not None:
            inner = loader.loader if isinstance(loader, StatefulLoader) else loader
            protect_workers(inner, self._guard.in_worker)

    def after_batch(self, trainer: L.Trainer) -> None:
        """A batch is done; between the micro-batches of one step of Lightning's nothing can be saved."""
        step = trainer.global_step
        if step != self._step or not trainer.lightning_module.automatic_optimization:
            self._step = step
            self.boundary(trainer)
            if self._save_due and self._saves is not None:
                self._save_due = False
                self._saves.save_requested(trainer)

    def validation_starts(self, trainer: L.Trainer) -> None:
        """Whether the batches of this validation are points that all ranks reach equally often."""
        if self._guard is None:
            return
        batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        same = bool(trainer.strategy.broadcast(batches) == batches) and math.inf not in batches
        self._equal_validation = trainer.strategy.reduce_boolean_decision(same)

    def before_validation(self, trainer: L.Trainer) -> None:
        """A validation follows; callbacks may put averaged weights into the model for it."""
        self._norms_before = _norms(trainer) if self._guard is not None else None

    def after_validation_batch(self, trainer: L.Trainer) -> None:
        """In the middle of a validation, or of the sanity check."""
        if self._equal_validation and self._norms_before is not None:
            before, self._norms_before = self._norms_before, None
            same = all(map(torch.equal, before, _norms(trainer)))
            self._equal_validation = trainer.strategy.reduce_boolean_decision(same)
        if self._equal_validation:
            self.boundary(trainer)

    def boundary(self, trainer: L.Trainer, *, between_epochs: bool = False) -> None:
        """A point that all ranks reach equally often: stops here if all have agreed to.

        `between_epochs`: nothing of the next epoch has begun.
        """
        agreed = self._boundary.agreed() if self._boundary is not None else None
        if agreed != "stop":
            # In the middle of a validation a save is due, and is done at the next step.
            self._save_due |= agreed == "save"
            return
        self._step = self._step_now
        assert self._ending is not None
        self._ending.agreed()
        requested = StopRequested()
        try:
            if self._saves is not None:
                self._saves.save_at_stop(trainer, between_epochs=between_epochs)
        except Exception as error:
            self.end_if_lost(error)
            requested.failure = error
        if compat.is_spawned(trainer):
            self.carry_out(requested)  # in a spawned rank Lightning calls no `on_exception`
        raise requested

    def carry_out(self, requested: StopRequested) -> None:
        """Lightning has left its loops, and other callbacks have had their say."""
        if self._ending is not None:
            self._ending.end(requested)

    def end_if_lost(self, exception: BaseException) -> None:
        """Ends this process where a rank has gone while all were stopping: the newest complete checkpoint counts."""
        if self._guard is not None and self._guard.lost(exception):
            self._guard.ended_by(exception)

    def left_by(self, exception: BaseException) -> None:
        """An exception has left the fit: what ends this rank from now on, as srun does, asks for no stop."""
        self.end_if_lost(exception)
        if self._guard is not None and isinstance(exception, Exception):
            self._guard.close(failed=True)

    @property
    def _step_now(self) -> int:
        if self._step < 0 and self._session is not None:  # not restored yet
            return self._session.resume_step or 0
        return self._step


@rank_zero_only
def _say(text: str) -> None:
    print(text, flush=True)


@torch.no_grad()
def _norms(trainer: L.Trainer) -> tuple[Tensor, ...]:
    """The norm of this rank's part of each weight that is trained, in optimizers that name theirs."""
    groups = [group for one in trainer.optimizers for group in getattr(one, "param_groups", ())]
    parts = [part for group in groups for part in map(local_part, group["params"]) if part.numel()]
    return tuple(torch._foreach_norm(parts)) if parts else ()
