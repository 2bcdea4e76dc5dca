"""Sees to it that a stop is over in time: a rank whose main thread does not come to it is ended without it.

What makes no progress for ten seconds is reported once: which rank is waited for, where it stands, and until when.

The main thread may sit in a collective with a rank that is stopped or dead, in C code, or in a save that hangs. Then a
thread of each rank sees the deadline come: the first has the job restarted, from the newest complete checkpoint,
and all end with the exit code of a stop.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, Literal, NoReturn, TypeVar

from fairlead.facts import StopReason
from fairlead_hpc_signals.agreement import LocalAgreement, StopAgreement
from fairlead_hpc_signals.deadline import Deadline, Question
from fairlead_hpc_signals.flags import SignalFlags
from fairlead_hpc_signals.outcomes import StopOutcome, StopPolicy, exit_code_without_requeue, planned, to_stderr
from fairlead_hpc_signals.shutdown import OUTCOME, claim_requeue, requeued
from fairlead_runs.guard import Overdue
from fairlead_runs.mailbox import StoreMailbox
from fairlead_runs.waiting import own_standing

_LOOK_S: Final = 0.2  # how often, once a stop was requested
_SAY_S: Final = 10.0  # a rank without progress for so long is reported; heartbeats have its location by then
_ASK_S: Final = 2.0  # how often the ranks' locations are read, once one has made no progress for so long
_INSISTED_S: Final = 3.0  # what a second Ctrl-C gives the main thread: it raises KeyboardInterrupt there
_APART_S: Final = 1.0  # a second SIGTERM that comes sooner belongs to the first: a launcher often sends two
_STORE_S: Final = 3.0  # how long the store may take; the rank that hosts it may be the one that hangs

_LEAVE_S: Final = 5.0  # how long rank 0 waits for the others at the very end
_DEADLINE: Final = "shutdown/deadline"
_EARLY: Final = "shutdown/early"

Phase = Literal["training", "saving", "requeue"]
_AT: Final[Mapping[Phase, str]] = {"training": "in its step", "saving": "saving", "requeue": "ending"}
T = TypeVar("T")


class StopWatch:
    """The watch of one rank; its thread waits until a stop is requested, and costs the steps nothing."""

    def __init__(
        self,
        flags: SignalFlags,
        agreement: LocalAgreement | StopAgreement,
        deadline: Deadline,
        question: Question,
        policy: StopPolicy,
        overdue: Overdue,
    ) -> None:
        self.phase: Phase = "training"
        """What the main thread is at; from `requeue` on nothing is late any more."""
        self.overdue = overdue
        """What to do when it is late."""
        self.carried_out: Callable[[StopOutcome], object] = lambda _: None
        """What to do once that is done."""
        self._flags = flags
        self._agreement = agreement
        self._deadline = deadline
        self._question = question
        self._policy = policy
        mailbox = agreement.mailbox
        self._mailbox = mailbox.reconnect() if isinstance(mailbox, StoreMailbox) else mailbox
        self._shared = False
        self._ending = threading.Lock()
        self._closed = threading.Event()
        self._read, self._write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="fairlead-stop-deadline", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """A stop was requested without a signal to this rank."""
        if not self._closed.is_set():
            os.write(self._write, b"!")

    def close(self) -> None:
        """The stop is over, or the loop."""
        if self._closed.is_set():
            return
        self._closed.set()  # first: the thread looks when it wakes
        os.write(self._write, b"!")
        if self._thread is not threading.current_thread():
            self._thread.join(2.0)
        if not self._thread.is_alive():
            os.close(self._read)
            os.close(self._write)

    def end(self, why: str, without: tuple[int, ...] = (), *, restart: bool = True) -> NoReturn:
        """Ends this process now, whatever its main thread is in, with the exit code of a stop.

        Args:
            why: Why the stop could not be carried out as usual.
            without: The ranks that this is about.
            restart: Whether the job may be restarted.
        """
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread does it
        code = exit_code_without_requeue(tuple(self._flags.counts))
        try:
            code = self._carried_out(why, without, restart=restart).exit_code
        except Exception:  # a history that cannot be written, say: what is left is to end
            to_stderr(traceback.format_exc())
        self._asking(partial(self._leave, len(without)), _LEAVE_S + _STORE_S)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # full, closed, or there is none
                stream.flush()
        os._exit(code)

    # -- the thread

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._flags.fileno(), select.POLLIN)
        poll.register(self._read, select.POLLIN)
        if self._leads and self._deadline.in_job:
            threading.Thread(target=self._ask_early, name="fairlead-ask-early", daemon=True).start()
        poll.poll()
        if self._closed.is_set():
            return
        self._deadline.begin()
        if self._leads:
            self._question.start()
            if self.overdue.answers and self._final is None:  # who asks for that has an answer already
                self._announce()
        elif self._deadline.in_job:
            self._asking(self._hear_early)
        seen, since, reported = self._progress(), time.monotonic(), False
        standing, requested_at = own_standing(), -math.inf
        while not self._closed.wait(_LOOK_S):
            if not self._agreement.requested or self.phase == "requeue":
                continue
            now = self._progress()
            if now != seen:
                seen, since, reported = now, time.monotonic(), False
            self._end_if_insisted()
            failure = self._agreement.failure
            if failure is not None and failure.missing:  # without the store, the next collective fails
                self.end(failure.short, failure.missing)
            if self._share_deadline().left_to_save() < 0:
                self.end(f"no time is left, and this rank is still {self._at}")
            still = time.monotonic() - since
            if still < _SAY_S:
                continue
            if time.monotonic() - requested_at > _ASK_S:
                standing, requested_at = self.overdue.standing(), time.monotonic()
            limit = standing.patience_s if self.overdue.progress is not None else math.inf
            if self._leads and not reported:
                reported = True
                left = min(limit - still, self._deadline.left_to_save())
                to_stderr(f"the stop waits for {standing.text}; in {left:.0f} s the job ends without it")
            if still > limit:
                self.end(f"this rank is still {self._at}, and nothing has changed for {limit:g} s")

    def _ask_early(self) -> None:
        """Rank 0 asks for all, while they train; one that hangs at the signal cannot be waited for."""
        reason = self._question.ask_early()
        if not self._closed.is_set():
            end = None if reason.remaining_s is None else time.time() + reason.remaining_s
            self._asking(lambda: self._mailbox.put(_EARLY, json.dumps([end, reason.grace_s])))

    def _hear_early(self) -> None:
        if self._mailbox.has(_EARLY):
            end, grace_s = json.loads(self._mailbox.read([_EARLY])[0])
            self._deadline.expect(None if end is None else end - time.time(), grace_s)

    @property
    def _leads(self) -> bool:
        return self._agreement.mailbox.rank == 0

    def _progress(self) -> object:
        return self.overdue.progress() if self.overdue.progress is not None else None

    def _announce(self) -> None:
        names = " and ".join(self._flags.counts)
        hint = "; again to stop now" if "SIGINT" in self._flags.counts else ""
        to_stderr(f"{names or 'stop requested'}: stopping after this step, then saving{hint}")

    @property
    def _at(self) -> str:
        """What this rank is at, as part of a sentence."""
        return self.overdue.at() if self.overdue.at is not None and self.phase == "training" else _AT[self.phase]

    def _end_if_insisted(self) -> None:
        """Ends this process after a second Ctrl-C whose KeyboardInterrupt is not heard, or a person's second SIGTERM.

        In a job of a scheduler several SIGTERM belong to one stop.
        """
        times: dict[str, list[float]] = {}
        for flag in self._flags.flags:
            times.setdefault(flag.signal, []).append(flag.time)
        pressed, terminated = times.get("SIGINT", []), times.get("SIGTERM", [])
        if len(pressed) > 1 and time.time() - pressed[1] > _INSISTED_S:
            self.end("Ctrl-C was pressed again", restart=False)
        if len(terminated) > 1 and terminated[-1] - terminated[0] > _APART_S and not self._deadline.in_job:
            self.end("SIGTERM came again")

    def _share_deadline(self) -> Deadline:
        """The deadline, with what rank 0 has heard from the scheduler; read only when it counts."""
        summary = self._question.reason.remaining_s if self._leads else None
        if self._leads and summary is not None and not self._shared:
            self._shared = True
            self._asking(lambda: self._mailbox.put(_DEADLINE, str(time.time() + self._deadline.left())))
        elif not self._leads and not self._shared and self._deadline.left_to_save() < 0:
            self._shared = True
            if self._asking(lambda: self._mailbox.has(_DEADLINE)):
                (end,) = self._mailbox.read([_DEADLINE])
                self._deadline.learn(float(end) - time.time())
        return self._deadline

    # -- the end

    def _carried_out(self, why: str, without: tuple[int, ...], *, restart: bool) -> StopOutcome:
        """What the ranks do whose main threads do not come to it: one has the job restarted, all end alike."""
        policy, overdue = self._policy, self.overdue
        signals = tuple(self._flags.counts) if restart else ("SIGINT",)
        requeuer = overdue.requeuer()
        code = requeuer.exit_code if requeuer is not None else None
        if not self._claims():
            patience = max(_STORE_S, self._deadline.left())
            text = self._asking(lambda: self._mailbox.get(OUTCOME, patience), patience + _STORE_S)
            if text is not None:
                return StopOutcome.from_json(text)
            return planned(StopReason("unknown", "no rank reported it"), signals, policy, None, code)
        plan = planned(self._question.answer(), signals, policy, overdue.budget, code, self._final)
        plan = replace(plan, unsaved=why, without=without)
        if overdue.record is not None:
            overdue.record(plan)
        outcome = requeued(plan, requeuer, self._deadline)
        (overdue.tell or (lambda summary: to_stderr(summary.summary())))(outcome)
        self._asking(lambda: self._mailbox.put(OUTCOME, outcome.to_json()))
        self.carried_out(outcome)
        return outcome

    @property
    def _final(self) -> str | None:
        """Who requested that the job not restart, as far as this rank knows."""
        requested, decision = self._agreement.requested_by, self._agreement.decision
        if decision is not None:
            return decision.final
        return requested.why if requested is not None and requested.final else None

    def _leave(self, missing: int) -> None:
        """Rank 0 may host the store, without which the others would take this end for a failure: it goes last."""
        self._mailbox.arrive("shutdown/late")
        until = time.monotonic() + _LEAVE_S
        while self._leads and time.monotonic() < until:
            if self._mailbox.count("shutdown/late/count", 0) >= self._mailbox.world_size - missing:
                return
            time.sleep(_LOOK_S)

    def _claims(self) -> bool:
        """Whether this rank leads: the first to ask; without the store rank 0, or 1 where rank 0 takes it with it."""
        first = self._asking(lambda: claim_requeue(self._mailbox))
        return first if first is not None else self._mailbox.rank <= 1

    def _asking(self, call: Callable[[], T], seconds: float = _STORE_S) -> T | None:
        """What the store says; None where it does not answer: it may be in the process that hangs."""
        if not isinstance(self._mailbox, StoreMailbox):
            return call()
        from fairlead_distributed.threads import within  # it imports torch, which several ranks have done

        try:
            return within(seconds, call)
        except (RuntimeError, TimeoutError):
            return None
