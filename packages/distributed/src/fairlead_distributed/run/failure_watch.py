"""A rank that fails or hangs while a run is open: all ranks dump their stacks into the run directory, and none is left.

A stop on a signal and the end of the training are no failures; only an exception that leaves the script, or the block
`final`, is one.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch

from fairlead_distributed.alarms import Alarm, is_requested_stop
from fairlead_distributed.run.session import RunSession
from fairlead_distributed.stacks import flight_recorder_variables, show_stacks_on_signal
from fairlead_distributed.stuck import GRACE, RankWatch
from fairlead_launch.reports import REPORT_FD, lost_a_peer
from fairlead_runs.states import dump_folder

NOTE: Final = (
    "memory ran out; a smaller batch on each rank, activation checkpointing or sharding (fsdp2) helps: "
    "`fairlead plan`, or `fairlead_planning.plan` for a loop of your own, says by how much"
)
_TEXTS: Final = ("out of memory", "can't allocate memory", "_STATUS_ALLOC_FAILED")
"""What torch's own errors of another class say: its allocator for CPUs, cuBLAS and cuDNN."""


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that a device's or the host's memory is used up."""
    seen: list[BaseException] = []  # one that is raised a second time can be the context of its own context
    while error is not None and not any(error is one for one in seen):
        seen.append(error)
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def note_out_of_memory(error: BaseException) -> bool:
    """Adds what helps to the traceback of an error, once; whether memory ran out."""
    ran_out = ran_out_of_memory(error)
    if ran_out and NOTE not in getattr(error, "__notes__", ()):
        error.add_note(NOTE)
    return ran_out


_TIMEOUT: Final = timedelta(minutes=30)
"""Torch's own for a collective, where nothing else is known."""
_HANG_SHARE: Final = 0.8
"""Nothing has moved for this share of the time-out: all ranks are still there to dump their stacks."""


def name_root_cause(error: BaseException, environ: Mapping[str, str]) -> None:
    """Has torchrun name this rank as the root cause, where it would take the first that ended."""
    file = environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        what = f"{type(error).__name__}: {error}"[:2000]
        with suppress(OSError):  # torchrun then says less
            Path(file).write_text(json.dumps({"message": what, "timestamp": int(time.time())}), encoding="utf-8")


class SpokenForError(Exception):
    """This rank has failed after another one, whose error was reported for all."""


class FailureWatch:
    """Tells all ranks when this one fails, and dumps the stacks of all when nothing moves. It costs the steps nothing.

    `timeout` is that of a collective, `grace` how long the others have to hear of a failure.
    """

    def __init__(
        self, environ: Mapping[str, str], *, timeout: timedelta | None = None, grace: timedelta = GRACE
    ) -> None:
        self._environ = environ
        self._supervised = REPORT_FD in environ
        self._hang_after = (timeout if isinstance(timeout, timedelta) else _TIMEOUT) * _HANG_SHARE
        self._grace = grace
        self._watch: RankWatch | None = None
        self._earlier: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Spawned ranks make their own threads, and are none of torchrun's."""
        return {**self.__dict__, "_watch": None, "_earlier": None, "_environ": {}}

    def watch(
        self, session: RunSession, rank: int, local_rank: int, progress: Callable[[], object] | None = None
    ) -> None:
        """From now on the ranks, which are connected, hear of each other; that nothing moves `progress` shows."""
        self.close()  # what a fit that raised, and whose error was caught, has left
        recorder = dump_folder(session.path, "flight-recorder", session.start)
        if not faulthandler.is_enabled():
            # NCCL's watchdog aborts the process: this shows where it stood. `sys.stderr` may be no file.
            faulthandler.enable(file=2)
        show_stacks_on_signal()
        if torch.cuda.is_available():
            if rank == 0:
                (recorder / "nccl").mkdir(parents=True, exist_ok=True)
            for name, value in flight_recorder_variables(recorder).items():
                os.environ.setdefault(name, value)  # torch reads nothing else, and not before it dumps

        def heard(alarm: Alarm) -> None:
            if alarm.kind == "hang" and rank == 0:
                session.event("hang", seen_by=alarm.rank, host=alarm.host, reason=alarm.what)
            if alarm.kind == "lost" and rank == 1:  # rank 0 is gone, and one line is enough
                session.event("failed", rank=0, error=alarm.what)
            if alarm.kind == "gone" and not self._supervised:  # the supervisor saw how it ended
                session.event("failed", rank=alarm.rank, error=alarm.what)

        self._watch = RankWatch.of_process_group(
            dump_folder(session.path, "stacks", session.start),
            flight_recorder=recorder,
            grace=self._grace,
            progress=progress,
            hang_after=self._hang_after,
            say=(lambda text: None) if self._supervised else None,  # the supervisor says it
            local_rank=local_rank,
            heard=heard,
        )
        self._earlier, sys.excepthook = sys.excepthook, self._uncaught

    def left_by(self, exception: BaseException | None) -> None:
        """The training is left, perhaps by an exception that the script catches."""
        if self._watch is None:
            return
        if is_requested_stop(exception):
            self.close()
        elif isinstance(exception, SystemExit):
            self.failed(exception)  # no hook of Python's will see it
        else:
            assert exception is not None
            self._watch.leave(exception)

    def failed(self, error: BaseException, report: Callable[[], object] = lambda: None) -> None:
        """The training has failed, and the program ends of it: tells all ranks, and has their stacks dumped.

        `report` shows the error, where no other rank has failed before.
        """
        note_out_of_memory(error)
        if self._watch is None or is_requested_stop(error):
            report()
        else:

            def speak() -> None:
                name_root_cause(error, self._environ)
                report()

            self._watch.failed(error, secondary=lost_a_peer(error), exits=not self._supervised, report=speak)

    @contextmanager
    def final(self) -> Iterator[None]:
        """A block whose exceptions are failures of this rank.

        `SpokenForError` leaves it instead where the error of another rank is shown, and this one's is not to be.
        """
        try:
            yield
        except BaseException as error:
            shown = []
            self.failed(error, lambda: shown.append(True))
            if not shown and not self._supervised:  # a supervisor chooses by itself
                raise SpokenForError from error
            raise

    def close(self) -> None:
        """Everything is done."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
            if sys.excepthook == self._uncaught:
                sys.excepthook = self._earlier

    def _uncaught(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self.failed(error, lambda: self._earlier(kind, error, traceback))
