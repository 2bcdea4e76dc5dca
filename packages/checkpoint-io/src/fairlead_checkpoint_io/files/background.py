"""What a backend needs to save behind the loop: buffers that are copied into, and the thread that writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairlead.errors import CheckpointError
from fairlead_checkpoint_io.files.buffers import Arena, HostBuffers
from fairlead_checkpoint_io.files.writer import Writer

__all__ = ["Background"]


class Background:
    """Both come to life with the first save, and again with the first one after `close`, or in another process.

    Args:
        max_in_flight: Saves that may be unfinished at a time.
    """

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._buffers = HostBuffers()
        self._writer: Writer | None = None

    def begin(self) -> Arena:
        """The buffers for a save; waits, and says so, while too many are unfinished. `save` or `abandon` follows."""
        self._started().acquire()
        return self._buffers.take()

    @property
    def nbytes(self) -> int:
        """Host memory held for the next save, in bytes."""
        return self._buffers.nbytes

    def abandon(self, arena: Arena) -> None:
        """The save that was begun does not come."""
        self._buffers.give(arena)
        self._started().release()

    def save(self, path: Path, write: Callable[[], None], arena: Arena) -> None:
        """Calls `write` in the thread; it calls `arena.settle()` before it reads what was copied.

        Raises:
            CheckpointError: An earlier save failed; this one was accepted all the same.
        """
        writer = self._started()
        earlier = writer.take_errors()
        writer.save(path, write, lambda: self._buffers.give(arena))
        _raise(earlier)  # only now, so that one failure does not cost the next checkpoint too

    def remove(self, path: Path, remove: Callable[[], None]) -> None:
        """Calls `remove` behind the saves so far, unless the newest of them failed."""
        self._started().remove(path, remove)

    def drain(self) -> None:
        """Returns when the saves so far have ended."""
        if self._writer is not None and self._writer.usable:
            self._writer.drain()

    def finish(self) -> None:
        """Returns when the saves so far are durable.

        Raises:
            CheckpointError: One is not; each is reported once.
        """
        self.drain()
        if self._writer is not None:
            _raise(self._writer.take_errors())

    def close(self) -> None:
        """Finishes all saves and frees the buffers.

        Raises:
            CheckpointError: As `finish`.
        """
        writer, self._writer = self._writer, None
        if writer is not None and writer.usable:
            writer.close()
        self._buffers.close()
        if writer is not None:
            _raise(writer.take_errors())

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process (`ddp_spawn`) go the settings, not the thread."""
        return type(self), (self._max_in_flight,)

    def _started(self) -> Writer:
        if self._writer is None or not self._writer.usable:
            self._writer = Writer(self._max_in_flight)
        return self._writer


def _raise(error: CheckpointError | None) -> None:
    if error is not None:
        raise error
