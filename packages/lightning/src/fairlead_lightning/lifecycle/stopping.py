"""How a fit that has left Lightning's loops for a stop ends: what is saved, recorded, requeued, and told."""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fairlead.interfaces import BuildContext, Requeuer
from fairlead_distributed.alarms import to_stderr
from fairlead_distributed.run.session import RunSession
from fairlead_launch.reports import REPORT_FD, send_report
from fairlead_lightning import compat
from fairlead_lightning.build import build_backend
from fairlead_lightning.checkpoint.commits import copies_of
from fairlead_lightning.guard import StopGuard, StopSignals
from fairlead_lightning.loggers.preempting import mark_preempting
from fairlead_runs import Beat, count_starts, read_history, refusal
from fairlead_runs.commit import newest_complete
from fairlead_runs.heartbeat import place_of_thread
from fairlead_runs.waiting import Standing, grouped, listed, own_standing, ranks_text, waiting, waits_there

_BATCHES: Final = ("train", "validate", "sanity")
"""The phases of a rank in which one batch follows another."""
SAVES: Final = ("save", "stopping")
"""Those in which it writes."""

_SAVE_STALL_S: Final = 600.0
"""How long a save may stand at one place, and write nothing, until the stop goes on without it."""
_CHUNK: Final = 2**24
"""Bytes that count as progress of a save: more than heartbeats write meanwhile."""

_AT: Final = {
    "": "starting",
    "prepare": "preparing its data",
    "setup": "setting up and loading its checkpoint",
    "restore": "restoring its state",
    "first-batch": "in its first batch and step",
    "validate": "in its validation",
    "sanity": "in its sanity check",
    "save": "saving",
    "stopping": "saving",
}
"""What a rank is at in a phase, as part of a sentence; else it is in its step."""


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


class Ending:
    """How one fit ends for a stop: what its guard is given, whether the main thread comes to it or not.

    `step` is where the fit is, and `saves` whether it writes checkpoints; the others belong to the fit.
    """

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
        self._trainer = trainer
        self._session = session
        self._guard = guard
        self._config = context.resolution.requeue
        self._environ = context.environ
        self._step = step
        self._saves = saves
        self._say = say
        self._lacking: str | None = None
        self._reason: Any = None
        self._recorded = False
        self._requeuer = None
        if self._config.name != "none":
            self._requeuer = _RecordingRequeuer(build_backend(self._config, context), self._before_requeue, context)

    def prepare(self) -> None:
        """Tells the guard what to do where the main thread does not come to `carry_out` in time."""
        trainer = self._trainer

        def progress() -> object:
            if self._session.phase not in _BATCHES:
                place = place_of_thread()
                if self._session.phase in SAVES and not waits_there(place):
                    return self._session.phase, place, _written_bytes() // _CHUNK
                # A compiler moves; what else goes on before the first step of a start has nothing to lose.
                return self._session.phase, place if self._session.phase == "first-batch" else ""
            loop = trainer.fit_loop.epoch_loop
            return loop.batch_progress.total.ready, loop.val_loop.batch_progress.total.ready, trainer.sanity_checking

        self._guard.when_overdue(
            self._requeuer,
            budget=self._budget,
            record=self._record_late,
            tell=self._tell,
            progress=progress,
            answers=REPORT_FD not in self._environ,  # the supervisor does, for all ranks
            at=lambda: _at(self._session.phase),
            standing=self._standing,
        )

    def _standing(self) -> Standing:
        """Where the ranks are that the others wait for; all of them, where none stands out."""
        beats = [beat for beat in self._session.heartbeats() if beat.phase != "stopped"]
        if not beats:
            return own_standing()
        found = waiting(beats, time.time()) or waiting(beats, None)  # all stand still: who stands elsewhere is meant
        groups = grouped(found.behind if found is not None else beats)
        named = [f"{ranks_text(beat.rank for beat in group)} ({_stands(group[0])})" for group in groups]
        text = listed(named, most=4)
        if self._session.phase in SAVES and not waits_there(place_of_thread()):
            return Standing(text, _SAVE_STALL_S)
        if any(beat.phase in SAVES and not waits_there(beat.place) for beat in beats):
            return Standing(text, math.inf)  # that rank ends itself where its save hangs
        return Standing(text)

    def carry_out(self, requested: StopRequested) -> None:
        """Ends all ranks together, once Lightning has left its loops, and tells the user.

        Raises what the code of a save failed with, here or on another rank; nothing was requeued then.
        """
        trainer, session = self._trainer, self._session
        try:
            outcome = self._guard.save_and_requeue(
                lambda: self._save(requested),
                self._requeuer if trainer.is_global_zero else None,
                finish=self._finish,
                budget=self._budget,
                tell=self._tell,
            )
        except Exception as error:
            session.event(
                "failed", rank=trainer.global_rank, step=self._step(), error=f"{type(error).__name__}: {error}"
            )
            _close_loggers(trainer, "failed")  # Lightning does not come to it
            raise
        self._record(outcome.reason)
        session.beat("stopped", self._step())
        if outcome.refused or outcome.error:
            session.event("requeue-failed", error=outcome.refused or outcome.error)
        requested.code = requested.exit_code = outcome.exit_code
        requested.outcome = outcome
        compat.let_children_end(trainer)

    def _save(self, requested: StopRequested) -> None:
        # The state was saved where the ranks stopped: here it is waited for, or they learn that it was not.
        if requested.failure is not None:
            raise requested.failure
        self._session.check_owner()  # the job of a start that was replaced is not requeued
        copies = copies_of(self._trainer.strategy.checkpoint_io) if self._trainer.is_global_zero else None
        if copies is None:
            return
        asked_at = self._guard.decision.time
        elapsed = max(0.0, time.time() - asked_at) if asked_at is not None else 0.0
        why = copies.wait_uploaded(max(0.0, copies.stop_wait_s - elapsed))
        if why is not None:
            self._session.raise_if_replaced()
            self._lacking = why
            self._session.event("upload-unfinished", step=self._step(), why=why)

    def _record(self, reason: Any, **more: Any) -> None:
        if self._recorded:
            return
        self._recorded = True
        if reason.why != "cancelled" and set(self._guard.flags.counts) != {"SIGINT"}:
            mark_preempting(self._trainer.loggers)
        counts = count_starts(read_history(self._session.path / "history.jsonl"))
        self._session.event(
            "stop",
            any_rank=bool(more),
            step=self._step(),
            reason=reason.why,
            evidence=reason.evidence,
            by_scheduler=reason.scheduler_requeues,
            stops_before=dict(counts.stops or {}),
            failures_before=counts.failures,
            **more,
        )

    def _record_late(self, plan: Any) -> None:
        self._reason = plan.reason
        self._record(plan.reason, unsaved=plan.unsaved, without=list(plan.without))

    def _finish(self, reason: Any) -> None:
        self._record(reason)
        _close_loggers(self._trainer, "finished")

    def _budget(self, reason: Any) -> str | None:
        self._reason = reason  # the first rank hears it here, before anything is requeued
        return refusal(self._config, read_history(self._session.path / "history.jsonl"))

    def _before_requeue(self) -> None:
        # The scheduler may end this process in the requeue: the history has the stop before, also in a hurry.
        self._record(self._reason)
        self._session.event("requeue", any_rank=True, by=self._config.name, step=self._step())

    def _tell(self, outcome: Any) -> None:
        saved = "everything is saved" if self._saves else "no checkpoint was asked for"
        if self._lacking is not None:
            saved += f" in {self._session.path}, where the next start must find it: {self._lacking}"
        text = outcome.told(saved, f" at step {self._step()}", newest_text(self._session.path))
        if self._trainer.is_global_zero:
            self._say(text)
            send_report(
                self._environ, "", outcome.exit_code
            )  # where it ends late, nothing else says that it was a stop
        elif not send_report(self._environ, text, outcome.exit_code):  # in place of rank 0
            to_stderr(text)


def newest_text(run: Path) -> str | None:
    """Which checkpoint the next start of a run resumes from; None: it has none."""
    newest = newest_complete(run / "checkpoints").checkpoint
    return None if newest is None else f"The newest complete checkpoint is {newest.path.name}"


def _written_bytes() -> int:
    """What this process has written to files; 0 where the system does not count it."""
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return 0
    return int(re.findall(r"^write_bytes: (\d+)", text, re.MULTILINE)[0])


def _at(phase: str) -> str:
    return _AT.get(phase, "in its step")


def _stands(beat: Beat) -> str:
    return f"{_at(beat.phase)}, at {beat.place}" if beat.place else _at(beat.phase)


def _close_loggers(trainer: L.Trainer, status: str) -> None:
    """Finalizes the loggers, which Lightning would otherwise do once more, as failed; one that cannot fails no stop."""
    loggers, trainer.loggers = trainer.loggers, []
    for logger in loggers:
        try:
            logger.finalize(status)
        except Exception as error:
            to_stderr(f"{type(logger).__name__} could not be closed: {type(error).__name__}: {error}")


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

    def not_again(self) -> None:
        self._requeuer.not_again()

    def cancel(self) -> None:
        self._requeuer.cancel()
