"""What a backend needs to save behind the loop: buffers that are copied into, and the thread that writes them."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from fairlead.errors import CheckpointError, FairleadError
from fairlead_checkpoint_io.files.host_buffers import Arena, HostBuffers

__all__ = ["Background"]

_NICER: Final = 10  # where cores are scarce, the steps go first; a loop that waits for a save leaves them all to it

log = logging.getLogger("fairlead.checkpoint_io")


class Background:
    """Buffers and thread are made by the first save, and again by the first one after `close`, or in another process.

    Args:
        max_in_flight: Saves that may be unfinished at a time.
    """

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._buffers = HostBuffers()
        self._writer: _WriterThread | None = None

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
        """Calls `write` in the thread; it calls `arena.synchronize()` before it reads what was copied.

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

    def _started(self) -> _WriterThread:
        if self._writer is None or not self._writer.usable:
            self._writer = _WriterThread(self._max_in_flight)
        return self._writer


class _WriterThread:
    """The thread that writes, with a bound on the saves that wait for it.

    Python waits for the thread when the interpreter ends, so a save that was accepted is finished even
    when nobody calls `close`.

    Args:
        max_in_flight: Saves that may be unfinished at a time.
    """

    def __init__(self, max_in_flight: int) -> None:
        self._pid = os.getpid()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="fairlead-checkpoint", initializer=self._started)
        self._slots = threading.Semaphore(max_in_flight)
        self._errors: list[tuple[Path, BaseException]] = []
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._current: Path | None = None
        self._last_save_failed = False

    @property
    def usable(self) -> bool:
        """False in a forked child, which has no copy of the thread."""
        return self._pid == os.getpid()

    def acquire(self) -> None:
        """Takes a slot for a save; waits, and says so, while all are taken."""
        self._not_inside()
        if self._slots.acquire(blocking=False):
            return
        log.warning("training waits: %s is still being written", self._current or "the previous checkpoint")
        self._slots.acquire()

    def release(self) -> None:
        """Gives back a slot whose save was not begun."""
        self._slots.release()

    def save(self, path: Path, write: Callable[[], None], done: Callable[[], None]) -> None:
        """Queues a save that holds a slot; `done` is called in any case, when it has ended."""

        def run() -> None:
            self._current = path
            try:
                write()
            except BaseException as error:  # all of it is raised in the thread that trains
                self._last_save_failed = True
                self._failed(path, error)
            else:
                self._last_save_failed = False
            finally:
                self._current = None
                done()
                self._slots.release()

        self._executor.submit(run)

    def remove(self, path: Path, remove: Callable[[], None]) -> None:
        """Queues a deletion behind the saves; it is left out when the newest save before it failed."""

        def run() -> None:
            if self._last_save_failed:
                log.warning("%s is kept: the checkpoint after it was not written", path)
                return
            try:
                remove()
            except BaseException as error:  # as in `save`
                self._failed(path, error)

        self._executor.submit(run)

    def drain(self) -> None:
        """Returns when everything queued so far has ended."""
        self._not_inside()
        end: Future[None] = self._executor.submit(lambda: None)
        end.result()

    def close(self) -> None:
        """Finishes everything and ends the thread."""
        self._not_inside()
        self._executor.shutdown(wait=True)

    def take_errors(self) -> CheckpointError | None:
        """What went wrong since the last call, as one error with the paths in `where`; None: nothing."""
        with self._lock:
            errors, self._errors = self._errors, []
        if not errors:
            return None
        first = errors[0][1]
        what = "a checkpoint was not written" if len(errors) == 1 else f"{len(errors)} checkpoints were not written"
        failure = CheckpointError(
            f"{what} in the background",
            where="\n".join(str(path) for path, _ in errors),
            why="\n".join(dict.fromkeys(_reason(error) for _, error in errors)),
            fix=first.fix if isinstance(first, FairleadError) else None,
        )
        failure.__cause__ = first
        return failure

    def _failed(self, path: Path, error: BaseException) -> None:
        log.error("%s was not written: %s", path, _reason(error))  # at once: the next save may be hours away
        with self._lock:
            self._errors.append((path, error))

    def _started(self) -> None:
        self._thread = threading.get_ident()
        if sys.platform == "linux":  # elsewhere threads have no priority of their own
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICER))

    def _not_inside(self) -> None:
        if threading.get_ident() == self._thread:
            raise RuntimeError("a `then` callback must not call the checkpoint backend that runs it")


def _reason(error: BaseException) -> str:
    if isinstance(error, FairleadError):
        return f"{error.what}: {error.why}" if error.why else error.what
    return f"{type(error).__name__}: {error}"


def _raise(error: CheckpointError | None) -> None:
    if error is not None:
        raise error
