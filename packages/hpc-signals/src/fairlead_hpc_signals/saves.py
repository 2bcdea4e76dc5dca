"""A checkpoint that somebody asks for while the training goes on: all ranks save at the same boundary.

As for a stop, the thread of a rank's control plane freezes its counter and answers with the lowest boundary at which
the rank can still save; the highest of these is where all save. Then the next round begins.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from fairlead_hpc_signals.watch import to_stderr
from fairlead_runs.mailbox import LONG, StoreMailbox
from fairlead_runs.waiting import ranks_text

if TYPE_CHECKING:
    from fairlead_distributed.control_plane import ControlPlane

ANSWER_S: Final = 60.0
"""Seconds that the ranks may take to answer; without one of them there is no save, and the training goes on."""
_MARGIN_S: Final = 30.0  # beyond that, after which the main thread no longer believes in its own thread
_NO_SAVE: Final = "-"


class LocalSaves:
    """The saves of a single process; no store, no threads."""

    def __init__(self) -> None:
        self._asked = False

    def ask(self) -> None:
        """Asks for a save at the next boundary, from any thread."""
        self._asked = True

    def boundary(self, number: int) -> bool:
        """Whether to save here."""
        asked, self._asked = self._asked, False
        return asked

    def close(self) -> None:
        """Nothing runs in the background."""


class _Round:
    """One save, from the question to the boundary; what a thread knows of an earlier one does no harm."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.frozen = False
        self.answered = False
        self.boundary: int | None = None
        self.decided = threading.Event()
        self.until = float("inf")


class SaveAgreement:
    """Where the ranks save; made on all ranks, over the mailbox and the control plane of their agreement on a stop."""

    def __init__(self, plane: ControlPlane, mailbox: StoreMailbox, *, answer_s: float = ANSWER_S) -> None:
        self._plane = plane
        self._mailbox = mailbox
        self._answer_s = answer_s
        self._entered = -1
        self._round = _Round(0)
        self._changing = threading.Lock()
        plane.listen(mailbox, self._hear, self._lost)

    def ask(self) -> None:
        """Asks all ranks for a save, from any thread of any of them; `RuntimeError` where the store went away."""
        with self._changing:  # or the round that is asked for might just be over
            self._mailbox.put(f"{self._round.number}/asked")
        self._mailbox.ring()

    def boundary(self, number: int) -> bool:
        """Whether to save here; called between two steps, on all ranks with the same rising numbers."""
        # In this order: who froze the counter and then reads it sees this number, or this thread sees the freeze.
        self._entered = number
        current = self._round
        if not current.frozen:
            return False
        if not current.decided.wait(self._answer_s + _MARGIN_S):
            current.boundary = None
        elif current.boundary is not None and number < current.boundary:
            return False
        with self._changing:
            self._round = _Round(current.number + 1)
        self._mailbox.ring([self._mailbox.rank])  # it may have been asked for already, by a rank that was quicker
        return current.boundary is not None

    def close(self) -> None:
        """Ends the part of this rank; the others need no answer of it any more. `RuntimeError`: the store has gone."""
        try:
            self._answer(self._mailbox, self._round)
        finally:
            self._plane.leave(self._mailbox)

    # -- the plane's thread

    def _hear(self, mailbox: StoreMailbox) -> float | None:
        current, now = self._round, time.monotonic()
        if current.decided.is_set():
            return LONG
        if not current.frozen:
            if not mailbox.has(f"{current.number}/asked"):
                return LONG
            current.frozen = True
            current.until = now + self._answer_s
            self._answer(mailbox, current)
        verdict = f"{current.number}/verdict"
        if not mailbox.has(verdict) and mailbox.has(f"{current.number}/answer/all"):
            self._conclude(mailbox, current)
        if not mailbox.has(verdict):
            if now < current.until:
                return current.until - now
            missing = mailbox.missing(f"{current.number}/answer")
            own = f"{_NO_SAVE}{mailbox.rank}"  # several may be late at once, and one says it
            if mailbox.put_first(verdict, own) == own:
                who = f"{ranks_text(missing)} did" if missing else "the ranks did"
                to_stderr(f"nothing is saved: {who} not answer within {self._answer_s:.3g} s; training continues")
            mailbox.ring()
        (text,) = mailbox.read([verdict])
        current.boundary = None if text.startswith(_NO_SAVE) else int(text)
        current.decided.set()
        return LONG

    def _answer(self, mailbox: StoreMailbox, current: _Round) -> None:
        with self._changing:
            if current.answered:
                return
            current.answered = True
        arrived = mailbox.arrive(f"{current.number}/answer", str(self._entered + 1))
        if arrived and mailbox.has(f"{current.number}/asked"):  # and is not the end of the training, for all ranks
            self._conclude(mailbox, current)

    def _conclude(self, mailbox: StoreMailbox, current: _Round) -> None:
        boundary = max(map(int, mailbox.arrived(f"{current.number}/answer")))
        mailbox.put_first(f"{current.number}/verdict", str(boundary))
        mailbox.ring()

    def _lost(self, error: Exception) -> None:
        """The store is gone: nobody can ask any more, and nobody is to be waited for."""
        self._round.decided.set()
