"""What a rank leaves of itself after an alarm: the stacks of its threads, and torch's flight recorder."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from fairlead_distributed.alarms import Alarm, trouble_of
from fairlead_distributed.stacks import dump_flight_recorder, dump_stacks

_PATIENCE_S = 8.0  # the run may hang in a file system


class StackDump:
    """The dump of one rank into its file; `say` gets why there is none."""

    def __init__(self, path: Path, rank: int, flight_recorder: Path | None, say: Callable[[str], None]) -> None:
        self._path = path
        self._rank = rank
        self._flight_recorder = flight_recorder
        self._say = say
        self._writing = threading.Lock()
        self._written = False

    def write(self, alarm: Alarm) -> None:
        """Writes it: once after a failure, and each time that nothing moves."""
        if (trouble := trouble_of(_PATIENCE_S, self._write, alarm)) is not None:
            self._say(f"the stacks of rank {self._rank} are not in {self._path}: {trouble}")

    def _write(self, alarm: Alarm) -> None:
        with self._writing:
            if self._written:  # what a rank raises of another's absence has nothing to add
                return
            self._written = alarm.kind != "hang"
            dump_stacks(self._path, f"{alarm}\n{alarm.text}" if alarm.rank == self._rank else str(alarm))
            if self._flight_recorder is not None:
                dump_flight_recorder(self._flight_recorder, self._rank, frames=False)

    def detail(self, alarm: Alarm) -> None:
        """Once the others need not wait for this rank any more: torch takes seconds to find the lines of code."""
        if alarm.of_waiting and self._flight_recorder is not None:  # where it fails, what was dumped before is there
            trouble_of(_PATIENCE_S, dump_flight_recorder, self._flight_recorder, self._rank)
