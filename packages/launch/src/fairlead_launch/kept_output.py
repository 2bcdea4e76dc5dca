"""The log of a rank that another launcher started, `srun` or torchrun: a copy of what Python prints, in a file."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any, TextIO, cast

from fairlead_launch.output import clean_line, log_line, log_name


class _Kept:
    """A stream that also writes its lines to a log; a log that cannot be written ends nothing."""

    def __init__(self, stream: Any, log: TextIO, rank: int, number: int) -> None:
        self._stream = stream
        self._log: TextIO | None = log
        self._rank = rank
        self._number = number
        self._rest = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """Writes to both."""
        written = self._stream.write(text)
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                self._keep(line)
        return int(written or len(text))

    def writelines(self, lines: Any) -> None:
        """Writes to both."""
        for line in lines:
            self.write(line)

    def _keep(self, line: str) -> None:
        if self._log is not None:
            try:
                self._log.write(log_line(clean_line(line), self._rank, self._number))
            except (OSError, ValueError):  # a full disk; what is printed is still where the launcher leaves it
                self._log = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def copy_output(folder: Path, rank: int) -> None:
    """From now on keeps a copy of what this process prints to `sys.stdout` and `sys.stderr` in `folder`.

    What native code prints, and who holds an earlier stream, is not seen. Called again it changes nothing.
    """
    if isinstance(sys.stdout, _Kept):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log = (folder / log_name(rank)).open("a", buffering=1, errors="replace")
    except OSError as error:  # no reason not to train
        print(f"the output of rank {rank} is not saved: {error}", file=sys.stderr)
        return
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is not None:
            setattr(sys, name, cast("TextIO", _Kept(stream, log, rank, number)))
