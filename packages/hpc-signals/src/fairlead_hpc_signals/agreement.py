"""Any rank's wish becomes one decision: all ranks stop, or save, at the same step boundary. Without a cost per step.

A thread of each rank waits for its signals and asks all ranks. The thread of its control plane then freezes the rank's
counter and answers with the lowest boundary at which the rank can still do it; the highest of these is where all do.
The main thread waits at a boundary only between the freeze and that decision, for which no other main thread is needed:
a rank that sits in a collective does not hold up the others, and the ranks that it waits for continue until that step.

Each such round is of all wishes that the ranks have by then. One with a stop is the last; after a save comes the next.
"""

from __future__ import annotations

import atexit
import os
import select
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from fairlead_hpc_signals.deadline import Deadline
from fairlead_hpc_signals.decision import (
    ANSWER,
    DECISION,
    AgreementError,
    Answer,
    Requested,
    StopDecision,
    decide,
    no_agreement,
    request_of,
)
from fairlead_hpc_signals.flags import SignalFlags
from fairlead_hpc_signals.outcomes import to_stderr
from fairlead_runs.mailbox import LONG, Mailbox, StoreMailbox
from fairlead_runs.waiting import ranks_text

if TYPE_CHECKING:
    import torch.distributed as dist

    from fairlead_distributed.control_plane import ControlPlane

ANSWER_TIMEOUT: Final = timedelta(seconds=60)
"""How long ranks that have started may take to answer: C code may hold the interpreter's lock for as long as that."""
START_TIMEOUT: Final = timedelta(minutes=30)
"""How long ranks may take to start, when a signal comes before all have: as long as torch's process group waits."""
_SHARE: Final = 0.5  # of the time that there is for a stop
_MARGIN: Final = 30.0  # seconds beyond both, after which the main thread no longer believes in its own thread
_MOST_TURNS: Final = 60  # seconds that the last of thousands waits for one who speaks for it
_NOTHING: Final = "nothing"  # the verdict of a round in which no rank has answered with a wish

Agreed = Literal["stop", "save"]


class LocalAgreement:
    """The agreement of a single process; no store, no threads."""

    def __init__(self, flags: SignalFlags) -> None:
        self.decision: StopDecision | None = None
        """Where to stop; None before a stop is requested."""
        self.mailbox = Mailbox()
        """For what follows a decision."""
        self.failure: AgreementError | None = None
        """A single process agrees with itself."""
        self.requested_by: Requested | None = None
        """The call of `ask`, if there was one."""
        self._flags = flags
        self._save_wanted = False

    @property
    def requested(self) -> bool:
        """Whether to stop at the next boundary."""
        return self._flags.raised or self.requested_by is not None

    def boundary(self, number: int) -> Agreed | None:
        """What to do here: whether a signal has come, or `ask` or `ask_save` was called."""
        if self.requested:
            if self.decision is None:
                self.decision = decide([Answer(number, request_of(0, self._flags, self.requested_by))])
            if number >= self.decision.boundary:
                return "stop"
        wanted, self._save_wanted = self._save_wanted, False
        return "save" if wanted else None

    def ask(self, why: str, *, final: bool = False) -> None:
        """Asks for a stop without a signal; `final`: no other start is wanted."""
        self.requested_by = Requested.now(why, final=final, before=self.requested_by)

    def ask_save(self) -> None:
        """Asks for a save at the next boundary, from any thread."""
        self._save_wanted = True

    def close(self, *, failed: bool = False) -> None:
        """Nothing runs in the background."""


class StopAgreement:
    """Where the ranks stop or save; made on all ranks, after the process group, over a store that all share.

    A decision to stop is final: make another agreement for the next one, on all ranks in the same order.
    `start_timeout` is how long all ranks may take to start when a stop is requested, `answer_timeout` how long their
    answers may then take, at most half of what the `deadline` leaves. Where a rank does not answer, a stop fails, and a
    save is left out. `plane` is the control plane of these ranks, if they have one; `woken` is called when any rank
    asks for a stop.
    """

    def __init__(
        self,
        flags: SignalFlags,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        answer_timeout: timedelta = ANSWER_TIMEOUT,
        start_timeout: timedelta = START_TIMEOUT,
        plane: ControlPlane | None = None,
        deadline: Deadline | None = None,
        woken: Callable[[], object] | None = None,
    ) -> None:
        from fairlead_distributed.control_plane import ControlPlane

        self.decision: StopDecision | None = None
        """Where all stop; None before that was agreed on."""
        self.failure: AgreementError | None = None
        """Why there is no decision, though a stop was requested."""
        self.requested_by: Requested | None = None
        """The call of `ask` on this rank, if there was one."""
        self._pid = os.getpid()
        self._flags = flags
        self._save_wanted = False
        self._entered = -1
        self._frozen = False
        """Whether a round is going on: the main thread waits for its end."""
        self._settled = threading.Event()
        self._saves: list[int] = []
        """The boundaries at which a save was agreed on, and not made yet."""
        self._round = 0
        self._answered = -1
        """The last round that this rank has answered in."""
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        """Set once this rank knows that any rank asks for a stop."""
        self._answer_timeout, self._start_timeout = answer_timeout.total_seconds(), start_timeout.total_seconds()
        self._deadline_of_stop = deadline
        self._on_stop = woken
        self._closing = False
        self._awaited, self._deadline, self._patience_s = "answer", float("inf"), 0.0
        self._plane = plane if plane is not None else ControlPlane(store, rank, world_size)
        self.mailbox = self._plane.open("stop")
        """This rank's mailbox, for what follows a decision."""
        if self.mailbox.arrive("started") and self.mailbox.has("0/requested"):
            self.mailbox.ring()
        self._plane.listen(self.mailbox, self._hear, self._store_lost)
        self._stop_read, self._stop_write = os.pipe()
        self._watching = threading.Thread(target=self._watch, name="fairlead-stop-watch", daemon=True)
        self._watching.start()
        # A thread that comes back from torch while the interpreter ends would take the process down.
        atexit.register(self.close)

    @classmethod
    def of_process_group(cls, flags: SignalFlags, **options: Any) -> StopAgreement:
        """The agreement of torch's default process group, over its store; call it on all ranks."""
        import torch.distributed as dist

        from fairlead_distributed import group_store
        from fairlead_distributed.control_plane import ControlPlane

        plane, store = ControlPlane.of_process_group(), group_store()
        assert store is not None  # or there would be no plane
        return cls(flags, store, dist.get_rank(), dist.get_world_size(), plane=plane, **options)

    @property
    def requested(self) -> bool:
        """Whether any rank requested a stop, as far as this one knows."""
        return self._stopping.is_set() or self._wants_stop

    @property
    def _wants_stop(self) -> bool:
        return self._flags.raised or self.requested_by is not None

    # -- the main thread

    def boundary(self, number: int) -> Agreed | None:
        """What to do here; call it between two steps, on all ranks with the same rising numbers; gaps do no harm.

        `"save"` is returned once for all saves that were requested since the last one.

        Raises:
            AgreementError: A stop was requested, and not all ranks answered in time.
        """
        # In this order: who froze the counter and then reads it sees this number, or this thread sees the freeze.
        self._entered = number
        if not (self._frozen or self._saves or self.decision):
            return None
        return self._wait_for_decision(number)

    def ask(self, why: str, *, final: bool = False) -> None:
        """Asks all ranks to stop without a signal, from any thread; `RuntimeError` where the store went away.

        `final`: no other start is wanted.
        """
        self.requested_by = Requested.now(why, final=final, before=self.requested_by)
        self._ask_stop()

    def ask_save(self) -> None:
        """Asks all ranks for a save, from any thread of any of them; `RuntimeError` where the store went away."""
        self._save_wanted = True
        self._ask(self.mailbox)

    def all_heard(self, seconds: float) -> bool:
        """Whether every rank has answered a stop, within so many seconds: one that is dead by then died in it."""
        try:
            return self.decision is not None or self.mailbox.wait(f"{self._round}/answer/all", seconds)
        except RuntimeError:
            return False  # the rank that hosts the store is the one that died

    def close(self, *, failed: bool = False) -> None:
        """Ends the threads, at the end of the loop; the other ranks need no answer of this one any more.

        A rank that has `failed` gives none: the end of its launcher for the others is no stop.
        """
        if self._closing or os.getpid() != self._pid:  # a forked child shares our connections
            return
        atexit.unregister(self.close)
        self._closing = True
        os.write(self._stop_write, b"!")
        # Of a save that is requested now, and of the stop that may follow it before the others have ended too.
        rounds = [] if failed else [self._round, self._round + 1]
        answers = [partial(self._answer, self.mailbox, one) for one in rounds]
        leaves: list[Callable[[], None]] = [*answers, partial(self._plane.leave, self.mailbox)]
        for leave in leaves:
            try:
                leave()  # each, also where one before fails: the plane's thread has to end
            except RuntimeError as error:
                self._store_lost(error)  # whoever hosts the store has left before
        self._watching.join(2.0)
        if not self._watching.is_alive():
            os.close(self._stop_read)
            os.close(self._stop_write)

    def _wait_for_decision(self, number: int) -> Agreed | None:
        while self._frozen and self.failure is None:  # the next round may have begun already
            patience = self._answer_timeout + _MARGIN + (self._start_timeout if self.requested else 0.0)
            if not self._settled.wait(patience):
                if self.requested:
                    raise AgreementError("the ranks did not agree on a stop: the store does not answer")
                return None
        if self.failure is not None and self._frozen:
            raise self.failure
        if self.decision is not None and number >= self.decision.boundary:
            return "stop"
        due = [one for one in self._saves if one <= number]
        del self._saves[: len(due)]
        return "save" if due else None

    # -- the threads

    def _watch(self) -> None:
        """Waits for a signal of this rank, and asks all ranks to stop."""
        poll = select.poll()
        poll.register(self._flags.fileno(), select.POLLIN)
        poll.register(self._stop_read, select.POLLIN)
        while not self._closing:
            poll.poll()
            if self._flags.raised and not self._closing:
                try:
                    self._ask_stop()
                except RuntimeError as error:
                    self._store_lost(error)
                return

    def _ask_stop(self) -> None:
        # Signals mostly come to all ranks at once: the first speaks for all. It may be killed before it has; then the
        # next does a second later, and so on: each rings for all, and thousands at once would bring the store down.
        for _ in range(min(self.mailbox.count("askers") - 1, _MOST_TURNS)):
            if self._stopping.wait(1.0) or self._closing:
                return
        self._ask(self.mailbox)

    def _ask(self, mailbox: StoreMailbox) -> None:
        with self._lock:
            mailbox.put(f"{self._round}/requested")
        mailbox.ring()

    def _hear(self, mailbox: StoreMailbox) -> float | None:
        """Freezes the counter and answers when a round is requested, and learns its verdict; in the plane's thread."""
        if self._closing:
            return None
        number = self._round
        if not self._frozen:
            if not mailbox.has(f"{number}/requested"):
                return LONG
            self._settled.clear()
            self._frozen = True
            self._await("answer", self._answer_timeout)
            self._hear_of_stop(mailbox)
            self._answer(mailbox, number)
        self._hear_of_stop(mailbox)
        if not mailbox.has(f"{number}/verdict"):
            now = time.monotonic()
            if self._awaited == "started" and mailbox.has("started/all"):
                self._await("answer", self._answer_timeout)
            if now < self._deadline:
                return self._deadline - now
            self._give_up(mailbox, number)
        (verdict,) = mailbox.read([f"{number}/verdict"])
        if verdict.startswith("{"):
            self.decision = DECISION.validate_json(verdict)
        elif verdict.isdecimal():
            self._saves.append(int(verdict))
        elif verdict != _NOTHING and self._stopping.is_set():
            ranks, _, what = verdict.partition(" ")
            self.failure = no_agreement(tuple(map(int, ranks.split(","))), what)
            self._settled.set()
            return None
        with self._lock:
            self._round += 1
        self._frozen = False
        self._settled.set()
        if self.decision is not None:
            return None
        if self._wants_stop or self._save_wanted:  # since this rank has answered
            self._ask(mailbox)
        return 0.0

    def _hear_of_stop(self, mailbox: StoreMailbox) -> None:
        """Waits for ranks that have not started, once a stop is requested: a save is for those that train."""
        if self._stopping.is_set() or not mailbox.count("askers", 0):
            return
        self._stopping.set()
        if self._on_stop is not None:
            self._on_stop()
        self._await("started", self._start_timeout)

    def _await(self, what: str, seconds: float) -> None:
        if self._deadline_of_stop is not None and self._stopping.is_set():
            seconds = max(0.0, min(seconds, self._deadline_of_stop.left_of(_SHARE)))
        self._awaited, self._patience_s, self._deadline = what, seconds, time.monotonic() + seconds

    def _answer(self, mailbox: StoreMailbox, number: int) -> None:
        with self._lock:
            if self._answered >= number:
                return
            self._answered = number
            wanted, self._save_wanted = self._save_wanted, False
            answer = Answer(self._entered + 1, request_of(mailbox.rank, self._flags, self.requested_by), wanted)
            arrived = mailbox.arrive(f"{number}/answer", ANSWER.dump_json(answer).decode())
        if arrived and mailbox.has(f"{number}/requested"):  # and is not the end of the training, for all ranks
            self._conclude(mailbox, number)

    def _conclude(self, mailbox: StoreMailbox, number: int) -> None:
        answers = [ANSWER.validate_json(text) for text in mailbox.arrived(f"{number}/answer")]
        decision = decide(answers)
        verdict = _NOTHING
        if decision.flagged:
            verdict = DECISION.dump_json(decision).decode()
        elif any(answer.save for answer in answers):
            verdict = str(decision.boundary)
        # Only the first verdict counts: a rank whose patience ended may have been quicker.
        mailbox.put_first(f"{number}/verdict", verdict)
        mailbox.ring()

    def _give_up(self, mailbox: StoreMailbox, number: int) -> None:
        if mailbox.count(f"{number}/late") > 1 and mailbox.wait(f"{number}/verdict", 10.0):
            return
        awaited = "started" if self._awaited == "started" else f"{number}/answer"
        missing = mailbox.missing(awaited) or mailbox.missing(f"{number}/answer")
        if not missing:
            self._conclude(mailbox, number)  # the last to answer died before it could
            return
        did = f"did not {'start' if self._awaited == 'started' else 'answer'} within {self._patience_s:.3g} s"
        mailbox.put_first(f"{number}/verdict", f"{','.join(map(str, missing))} {did}")
        if not self._stopping.is_set():
            to_stderr(f"nothing is saved: {ranks_text(missing)} {did}; training continues")
        mailbox.ring()

    def _store_lost(self, error: Exception) -> None:
        """The store is gone: of no consequence until a stop is requested."""
        if self.decision is None and self.failure is None:
            self.failure = no_agreement((), f"lost the store: {str(error).splitlines()[0] if str(error) else error!r}")
        self._frozen = self._wants_stop or self._stopping.is_set()
        self._settled.set()
