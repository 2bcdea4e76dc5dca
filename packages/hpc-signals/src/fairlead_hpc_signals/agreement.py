"""Any rank's signal becomes one decision: all ranks stop at the same step boundary. Without a cost per step.

A thread of each rank waits for its signals, and asks all ranks for a stop. The thread of its control plane then freezes
the rank's counter and answers with the lowest boundary at which the rank can still stop; the highest of these is where
all stop. The main thread waits at a boundary only between the freeze and that decision, for which no other main thread
is needed: a rank that sits in a collective holds nobody up, and the ranks that it waits for go on until that step.
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
from typing import TYPE_CHECKING, Any, Final

from fairlead_hpc_signals.deadline import Deadline
from fairlead_hpc_signals.decision import (
    ANSWER,
    DECISION,
    AgreementError,
    Answer,
    Asked,
    StopDecision,
    decide,
    no_agreement,
    request_of,
)
from fairlead_hpc_signals.flags import SignalFlags
from fairlead_hpc_signals.saves import LocalSaves, SaveAgreement
from fairlead_runs.mailbox import LONG, Mailbox, StoreMailbox

if TYPE_CHECKING:
    import torch.distributed as dist

    from fairlead_distributed.control_plane import ControlPlane

ANSWER_TIMEOUT: Final = timedelta(seconds=60)
"""How long ranks that have started may take to answer: C code may hold the interpreter's lock for as long as that."""
START_TIMEOUT: Final = timedelta(minutes=30)
"""How long ranks may take to start, when a signal comes before all have: as long as torch's process group waits."""
_SHARE: Final = 0.5  # of the time that there is for a stop
_MARGIN: Final = 30.0  # seconds beyond both, after which the main thread no longer believes in its own thread


class LocalAgreement:
    """The agreement of a single process; no store, no threads."""

    def __init__(self, flags: SignalFlags) -> None:
        self.decision: StopDecision | None = None
        """Where to stop; None before a stop is asked for."""
        self.mailbox = Mailbox()
        """For what follows a decision."""
        self.failure: AgreementError | None = None
        """A single process agrees with itself."""
        self._flags = flags
        self.saves = LocalSaves()
        """The checkpoints that are asked for meanwhile."""
        self.asked_by: Asked | None = None
        """The call of `ask`, if there was one."""

    @property
    def asked(self) -> bool:
        """Whether to stop at the next boundary."""
        return self._flags.raised or self.asked_by is not None

    def boundary(self, number: int) -> bool:
        """Whether a signal has come, or `ask` was called."""
        if not self.asked:
            return False
        if self.decision is None:
            self.decision = decide([Answer(number, request_of(0, self._flags, self.asked_by))])
        return number >= self.decision.boundary

    def ask(self, why: str, *, final: bool = False) -> None:
        """Asks for a stop without a signal; `final`: no other start is wanted."""
        self.asked_by = Asked.now(why, final=final, before=self.asked_by)

    def close(self, *, failed: bool = False) -> None:
        """Nothing runs in the background."""


class StopAgreement:
    """Where the ranks stop; made on all ranks, after the process group, over a store that all share.

    A decision is final: make another agreement for the next one, on all ranks in the same order. `start_timeout` is how
    long all ranks may take to start, `answer_timeout` how long their answers may then take, at most half of what the
    `deadline` leaves; `plane` is the control plane of these ranks, if they have one; `woken` is called when any rank
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
        """What was agreed; None before that."""
        self._pid = os.getpid()
        self._flags = flags
        self._entered = -1
        self._frozen = False
        self.failure: AgreementError | None = None
        """Why there is no decision, though a stop was asked for."""
        self._decided = threading.Event()
        self._answer_timeout, self._start_timeout = answer_timeout.total_seconds(), start_timeout.total_seconds()
        self._deadline_of_stop = deadline
        self._on_freeze = woken
        self._closing = False
        self._woken = threading.Event()
        self._answering = threading.Lock()
        self._answered = False
        self.asked_by: Asked | None = None
        """The call of `ask` on this rank, if there was one."""
        self._awaited, self._deadline, self._patience_s = "started", float("inf"), 0.0
        self._plane = plane if plane is not None else ControlPlane(store, rank, world_size)
        self.mailbox = self._plane.open("stop")
        """This rank's mailbox, for what follows a decision."""
        if self.mailbox.arrive("started") and self.mailbox.count("askers", 0):
            self.mailbox.ring()
        self._plane.listen(self.mailbox, self._hear, self._store_lost)
        self.saves = SaveAgreement(self._plane, self.mailbox.under("save"))
        """The checkpoints that are asked for meanwhile."""
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
    def asked(self) -> bool:
        """Whether any rank was asked to stop, as far as this one knows."""
        return self._frozen or self._flags.raised or self.asked_by is not None

    # -- the main thread

    def boundary(self, number: int) -> bool:
        """Whether to stop here; call it between two steps, on all ranks with the same rising numbers; gaps do no harm.

        Raises:
            AgreementError: A stop was asked for, and not all ranks answered in time.
        """
        # In this order: who froze the counter and then reads it sees this number, or this thread sees the freeze.
        self._entered = number
        if not self._frozen:
            return False
        return self._wait_for_decision(number)

    def ask(self, why: str, *, final: bool = False) -> None:
        """Asks all ranks to stop without a signal, from any thread; `RuntimeError` where the store went away.

        `final`: no other start is wanted.
        """
        self.asked_by = Asked.now(why, final=final, before=self.asked_by)
        self._wake_all()

    def all_heard(self, seconds: float) -> bool:
        """Whether every rank has answered a stop, within so many seconds: one that is dead by then died in it."""
        try:
            return self.decision is not None or self.mailbox.wait("answer/all", seconds)
        except RuntimeError:
            return False  # the rank that hosts the store is the one that died

    def close(self, *, failed: bool = False) -> None:
        """Ends the threads, at the end of the loop; the ranks that go on need no answer of this one any more.

        A rank that has `failed` gives none: the end of its launcher for the others is no stop.
        """
        if self._closing or os.getpid() != self._pid:  # a forked child shares our connections
            return
        atexit.unregister(self.close)
        self._closing = True
        os.write(self._stop_write, b"!")
        answers: list[Callable[[], None]] = [] if failed else [partial(self._answer, self.mailbox)]
        # Each, also where one before fails: the plane's thread has to end.
        leaves: list[Callable[[], None]] = [*answers, self.saves.close, partial(self._plane.leave, self.mailbox)]
        for leave in leaves:
            try:
                leave()
            except RuntimeError as error:
                self._store_lost(error)  # whoever hosts the store has left before
        self._watching.join(2.0)
        if not self._watching.is_alive():
            os.close(self._stop_read)
            os.close(self._stop_write)

    def _wait_for_decision(self, number: int) -> bool:
        if not self._decided.wait(self._answer_timeout + self._start_timeout + _MARGIN):
            raise AgreementError("the ranks did not agree on a stop: the store does not answer")
        if self.decision is None:
            assert self.failure is not None
            raise self.failure
        return number >= self.decision.boundary

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
                    self._wake_all()
                except RuntimeError as error:
                    self._store_lost(error)
                return

    def _wake_all(self) -> None:
        # Signals mostly come to all ranks at once: the first speaks for all. It may be killed before it has.
        if self.mailbox.count("askers") > 1 and self._woken.wait(1.0):
            return
        self.mailbox.ring()

    def _hear(self, mailbox: StoreMailbox) -> float | None:
        """Freezes the counter and answers when a stop is asked for, and learns the decision; in the plane's thread."""
        if self._closing:
            return None
        if not self._frozen:
            if not mailbox.count("askers", 0):
                return LONG
            self._frozen = True
            self._woken.set()
            if self._on_freeze is not None:
                self._on_freeze()
            self._await("started", self._start_timeout)
            self._answer(mailbox)
        if not mailbox.has("verdict"):
            now = time.monotonic()
            if self._awaited == "started" and mailbox.has("started/all"):
                self._await("answer", self._answer_timeout)
            if now < self._deadline:
                return self._deadline - now
            self._give_up(mailbox)
        (verdict,) = mailbox.read(["verdict"])
        if verdict.startswith("{"):
            self.decision = DECISION.validate_json(verdict)
        else:
            ranks, _, what = verdict.partition(" ")
            self.failure = no_agreement(tuple(map(int, ranks.split(","))), what)
        self._decided.set()
        return None

    def _await(self, what: str, seconds: float) -> None:
        if self._deadline_of_stop is not None:
            seconds = max(0.0, min(seconds, self._deadline_of_stop.left_of(_SHARE)))
        self._awaited, self._patience_s, self._deadline = what, seconds, time.monotonic() + seconds

    def _answer(self, mailbox: StoreMailbox) -> None:
        with self._answering:
            if self._answered:
                return
            self._answered = True
            answer = Answer(self._entered + 1, request_of(mailbox.rank, self._flags, self.asked_by))
            if mailbox.arrive("answer", ANSWER.dump_json(answer).decode()) and mailbox.count("askers", 0):
                self._conclude(mailbox)

    def _conclude(self, mailbox: StoreMailbox) -> None:
        decision = decide(ANSWER.validate_json(text) for text in mailbox.arrived("answer"))
        # Only the first verdict counts: a rank whose patience ended may have been quicker.
        mailbox.put_first("verdict", DECISION.dump_json(decision).decode())
        mailbox.ring()

    def _give_up(self, mailbox: StoreMailbox) -> None:
        if mailbox.count("late") > 1 and mailbox.wait("verdict", 10.0):
            return
        missing = mailbox.missing(self._awaited) or mailbox.missing("answer")
        if not missing:
            self._conclude(mailbox)  # the last to answer died before it could
            return
        did = f"did not {'start' if self._awaited == 'started' else 'answer'} within"
        mailbox.put_first("verdict", f"{','.join(map(str, missing))} {did} {self._patience_s:.3g} s")
        mailbox.ring()

    def _store_lost(self, error: Exception) -> None:
        """The store is gone: of no consequence until a stop is asked for."""
        if self.decision is None and self.failure is None:
            self.failure = no_agreement((), f"lost the store: {str(error).splitlines()[0] if str(error) else error!r}")
        self._decided.set()
        if self._flags.raised or self.asked_by is not None:
            self._frozen = True
