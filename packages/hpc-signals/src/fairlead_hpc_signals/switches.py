"""Looks for the switch files of a run, in a thread of one rank: the steps pay nothing for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fairlead_hpc_signals.outcomes import StopOutcome, to_stderr
from fairlead_runs.switches import SAVE, STOP, Switch, find_switch, take_switch

if TYPE_CHECKING:
    from fairlead_hpc_signals.agreement import LocalAgreement, StopAgreement

INTERVAL_S: Final = 1.0
"""Seconds between two looks: two questions to the file system, from one rank."""


_SLACK_S: Final = 5.0  # by which the file system's clock may be behind ours


class SwitchFiles:
    """Asks for a save, or a stop, when `SAVE` or `STOP` appears in a run directory; rank 0 looks, at once and then on.

    `SAVE` is taken away when it is seen, `STOP` when the stop was carried out: a job that is killed before that, and
    restarted, stops then.

    Args:
        run: The run directory.
        record: Writes an event into the run's history; None: nothing is written.
    """

    def __init__(
        self, run: Path, record: Callable[..., object] | None = None, *, interval_s: float = INTERVAL_S
    ) -> None:
        self._run = run
        self._record = record
        self._interval_s = interval_s
        self._left: tuple[int, int] | None = None
        self._began = time.time()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, agreement: LocalAgreement | StopAgreement, ask: Callable[..., None]) -> None:
        """Looks from now on, on rank 0 of those that agree; stops are requested by `ask`."""
        if self._thread is not None or agreement.mailbox.rank > 0:
            return
        # The first look is here: a `STOP` from before this start is to stop it before its first step.
        if not self._look(agreement.ask_save, ask):
            self._thread = threading.Thread(
                target=self._watch, args=(agreement.ask_save, ask), name="fairlead-switch-files", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Looks no more."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def carried_out(self, outcome: StopOutcome) -> None:
        """Removes the `STOP` that requested this stop; one that came later stays.

        It stays as well where the job restarts all the same: then it is to stop once more.
        """
        if outcome.requested is None or outcome.reason.scheduler_requeues or outcome.error is not None:
            return
        with suppress(OSError):  # a disk that refused the checkpoint may refuse this
            switch = find_switch(self._run, STOP)
            if switch is not None and str(switch) == outcome.requested:
                refused = take_switch(switch)
                if refused is not None:
                    print(f"{switch} cannot be removed ({refused}): each start stops until it is", flush=True)

    # -- the thread

    def _watch(self, save: Callable[[], None], stop: Callable[..., None]) -> None:
        while not self._closed.is_set():
            self._closed.wait(self._interval_s)
            try:
                if self._look(save, stop):
                    return
            except RuntimeError:  # the ranks' store has gone: the run ends
                return

    def _look(self, save: Callable[[], None], stop: Callable[..., None]) -> bool:
        """Whether a stop was requested."""
        with suppress(OSError):  # a file system that does not answer now is retried
            found = find_switch(self._run, STOP)
            if found is not None:
                stop(str(found), final=True)
                self._note(found, self._stopping(found))
                return True
            found = find_switch(self._run, SAVE)
            if found is not None and found.identity != self._left:
                refused = take_switch(found)
                self._left = found.identity if refused is not None else None
                save()  # before it is written down: who reads that may rely on it
                self._note(found, "saving after this step", refused)
        return False

    def _stopping(self, switch: Switch) -> str:
        if self._began - switch.time < _SLACK_S:
            return "stopping after this step, then saving"
        when = datetime.fromtimestamp(switch.time).strftime("%Y-%m-%d %H:%M:%S")
        return f"it is there since {when}, before this start, which therefore trains nothing; the next one resumes"

    def _note(self, switch: Switch, what: str, refused: str | None = None) -> None:
        if self._record is not None:
            self._record("switch", file=switch.path.name, by=switch.by, **({"left": refused} if refused else {}))
        left = f"; {switch.path} cannot be removed ({refused}): remove it yourself" if refused else ""
        to_stderr(f"{switch}: {what}{left}")
