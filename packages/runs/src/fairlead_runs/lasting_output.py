"""Output that cannot be written is lost, and the training continues: `| head` has gone, the log's disk is full."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast


class _Lasting:
    """A text stream that loses what cannot be written, instead of raising it wherever the training prints.

    A reader that has gone does not come back: from then on the file is `/dev/null`. A full disk may have room again.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError as error:
            self._lost(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self._lost(error)

    def end(self) -> None:
        """The program ends: what is left and cannot be written must not change its exit code (120, by Python)."""
        try:
            self.stream.flush()
        except OSError:
            self._to_nowhere()

    def _lost(self, error: OSError) -> None:
        if error.errno == errno.EPIPE:
            self._to_nowhere()
        else:
            atexit.unregister(self.end)
            atexit.register(self.end)

    def _to_nowhere(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # a stream without a file keeps nothing
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def keep_output() -> None:
    """From now on nothing that prints to `sys.stdout` and `sys.stderr` fails of it; `give_output_back` ends that."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        _occupy(number)
        stream = getattr(sys, name)
        if stream is None:  # a daemon's; who prints, asks whether it is a terminal, or flushes, need not know that
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it stays
        if not isinstance(stream, _Lasting):
            setattr(sys, name, cast("TextIO", _Lasting(stream)))


def _occupy(number: int) -> None:
    """Where stderr is closed, the next file that is opened gets its number, and with it what C code says there."""
    with contextlib.suppress(OSError):
        os.fstat(number)
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)


def give_output_back() -> None:
    """The streams of before, unless they still refuse what is left; who has put something over them keeps it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, _Lasting):
            with contextlib.suppress(OSError):
                stream.stream.flush()
                setattr(sys, name, stream.stream)
