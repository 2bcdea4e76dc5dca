"""The boundary between two steps, where the ranks agree on stops and saves; and how a run ends for a stop."""

from __future__ import annotations

import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

from fairlead.backends import build_backend
from fairlead.interfaces import BuildContext, Requeuer
from fairlead_distributed.alarms import to_stderr
from fairlead_distributed.run.session import RunSession
from fairlead_launch.reports import REPORT_FD, send_report
from fairlead_runs import Beat, count_starts, read_history, refusal
from fairlead_runs.checkpoint_io import CheckpointCopies
from fairlead_runs.commit import newest_complete
from fairlead_runs.guard import Overdue, StopGuard
from fairlead_runs.heartbeat import location_of_thread
from fairlead_runs.waiting import Standing, grouped, listed, own_standing, ranks_text, waiting, waits_there


class Boundary:
    """A point that all ranks reach equally often, where a stop or a checkpoint can be carried out.

    Example:
        >>> match boundary.agreed():  # doctest: +SKIP
        ...     case "stop":
        ...         save_and_leave()
        ...     case "save":
        ...         save()
    """

    def __init__(self, session: RunSession, guard: StopGuard) -> None:
        self._session = session
        self._guard = guard

    def agreed(self) -> Literal["stop", "save"] | None:
        """Whether all ranks stop or save here because it was requested; periodic saves are the engine's.

        All ranks call it together and get the same answer. A call increments a counter, and sends nothing.
        """
        if self._guard.should_stop():
            return "stop"
        requested = self._guard.should_save()
        return "save" if self._session.proof_saves() or requested else None


_BATCHES: Final = ("train", "validate", "sanity")
"""The phases of a rank in which one batch follows another."""
_SAVES: Final = ("save", "stopping")
"""Those in which it writes."""

_SAVE_STALL_S: Final = 600.0
"""How long a save may stand at one line, and write nothing, until the stop continues without it."""
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


class Ending(ABC):
    """How one start of a run ends for a stop: what its guard is given, whether the main thread comes to it or not.

    An engine says by overriding `batches_done`, `copies`, `mark_preempting` and `close_loggers` what it knows.

    Args:
        session: The run.
        guard: What noticed the stop.
        context: Has the settings of the requeue.
        rank: This rank.
        step: The optimizer step that the training is at.
        saves: Whether it writes checkpoints.
        say: Tells the user, on rank 0.
    """

    def __init__(
        self,
        session: RunSession,
        guard: StopGuard,
        context: BuildContext,
        *,
        rank: int,
        step: Callable[[], int],
        saves: bool,
        say: Callable[[str], None],
    ) -> None:
        self.session = session
        self.guard = guard
        self.rank = rank
        self._config = context.resolution.requeue
        self._environ = context.environ
        self._step = step
        self._saves = saves
        self._say = say
        self._lacking: str | None = None
        self._reason: Any = None
        self._recorded = False
        self._requeuer: Requeuer | None = None
        if self._config.name != "none":
            self._requeuer = _RecordingRequeuer(build_backend(self._config, context), self._before_requeue, context)

    # -- what an engine knows

    @abstractmethod
    def batches_done(self) -> object:
        """Changes with each batch, of training and of validation."""

    def copies(self) -> CheckpointCopies | None:
        """What copies the checkpoints elsewhere, on rank 0."""
        return None

    @abstractmethod
    def mark_preempting(self) -> None:
        """Tells loggers of a service that the job will be restarted."""

    @abstractmethod
    def close_loggers(self, status: str) -> None:
        """Closes the loggers; one that cannot fails no stop."""

    # -- the end

    def prepare(self) -> None:
        """Tells the guard what to do where the main thread does not come to `carry_out` in time."""

        def progress() -> object:
            if self.session.phase not in _BATCHES:
                place = location_of_thread()
                if self.session.phase in _SAVES and not waits_there(place):
                    return self.session.phase, place, _written_bytes() // _CHUNK
                # A compiler moves; what else goes on before the first step of a start has nothing to lose.
                return self.session.phase, place if self.session.phase == "first-batch" else ""
            return self.batches_done()

        overdue = Overdue(
            lambda: self._requeuer,
            budget=self._budget,
            record=self._record_late,
            tell=self._tell,
            progress=progress,
            answers=REPORT_FD not in self._environ,  # the supervisor does, for all ranks
            at=lambda: _at(self.session.phase),
            standing=self._standing,
        )
        self.guard.when_overdue(overdue)

    def agreed(self) -> None:
        """All ranks have agreed to stop here, which is recorded."""
        decision = self.guard.decision
        self.session.event(
            "signal",
            signals=list(decision.signals),
            ranks=[request.rank for request in decision.requests],
            asked=[request.why for request in decision.requests if request.why],
            step=self._step(),
        )
        self.session.beat("stopping", self._step())

    def carry_out(self, failure: Exception | None) -> Any:
        """Ends all ranks together and tells the user; the guard's outcome. `failure` is why this rank could not save.

        Raises what the code of a save failed with, here or on another rank; nothing was requeued then.
        """
        session = self.session
        try:
            outcome = self.guard.save_and_requeue(
                lambda: self._save(failure),
                self._requeuer if self.rank == 0 else None,
                finish=self._finish,
                budget=self._budget,
                tell=self._tell,
            )
        except Exception as error:
            session.event("failed", rank=self.rank, step=self._step(), error=f"{type(error).__name__}: {error}")
            self.close_loggers("failed")
            raise
        self._record(outcome.reason)
        session.beat("stopped", self._step())
        if outcome.refused or outcome.error:
            session.event("requeue-failed", error=outcome.refused or outcome.error)
        return outcome

    def _standing(self) -> Standing:
        """Where the ranks are that the others wait for; all of them, where none stands out."""
        beats = [beat for beat in self.session.heartbeats() if beat.phase != "stopped"]
        if not beats:
            return own_standing()
        found = waiting(beats, time.time()) or waiting(beats, None)  # all stand still: who stands elsewhere is meant
        groups = grouped(found.behind if found is not None else beats)
        named = [f"{ranks_text(beat.rank for beat in group)} ({_stands(group[0])})" for group in groups]
        text = listed(named, most=4)
        if self.session.phase in _SAVES and not waits_there(location_of_thread()):
            return Standing(text, _SAVE_STALL_S)
        if any(beat.phase in _SAVES and not waits_there(beat.location) for beat in beats):
            return Standing(text, math.inf)  # that rank ends itself where its save hangs
        return Standing(text)

    def _save(self, failure: Exception | None) -> None:
        # The state was saved where the ranks stopped: here it is waited for, or they learn that it was not.
        if failure is not None:
            raise failure
        self.session.check_owner()  # the job of a start that was replaced is not requeued
        copies = self.copies() if self.rank == 0 else None
        if copies is None:
            return
        requested_at = self.guard.decision.time
        elapsed = max(0.0, time.time() - requested_at) if requested_at is not None else 0.0
        why = copies.wait_uploaded(max(0.0, copies.stop_wait_s - elapsed))
        if why is not None:
            self.session.raise_if_replaced()
            self._lacking = why
            self.session.event("upload-unfinished", step=self._step(), why=why)

    def _record(self, reason: Any, **more: Any) -> None:
        if self._recorded:
            return
        self._recorded = True
        if reason.why != "cancelled" and set(self.guard.flags.counts) != {"SIGINT"}:
            self.mark_preempting()
        counts = count_starts(read_history(self.session.path / "history.jsonl"))
        self.session.event(
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
        self.close_loggers("finished")

    def _budget(self, reason: Any) -> str | None:
        self._reason = reason  # the first rank hears it here, before anything is requeued
        return refusal(self._config, read_history(self.session.path / "history.jsonl"))

    def _before_requeue(self) -> None:
        # The scheduler may end this process in the requeue: the history has the stop before, also in a hurry.
        self._record(self._reason)
        self.session.event("requeue", any_rank=True, by=self._config.name, step=self._step())

    def _tell(self, outcome: Any) -> None:
        saved = "everything is saved" if self._saves else "no checkpoint was requested"
        if self._lacking is not None:
            saved += f" in {self.session.path}, where the next start must find it: {self._lacking}"
        text = outcome.summary(saved, f" at step {self._step()}", newest_text(self.session.path))
        if self.rank == 0:
            self._say(text)
            # Where it ends late, nothing else says that it was a stop.
            send_report(self._environ, "", outcome.exit_code)
        elif not send_report(self._environ, text, outcome.exit_code):  # instead of rank 0
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
    return f"{_at(beat.phase)}, at {beat.location}" if beat.location else _at(beat.phase)


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

    def cancel(self) -> None:
        self._requeuer.cancel()
