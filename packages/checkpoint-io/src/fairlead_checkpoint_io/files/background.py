"""What a backend needs to save behind the loop: buffers that are copied into, and the thread that writes them."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from fairlead.errors import CheckpointError, FairleadError
from fairlead_checkpoint_io.files.formats import reason
from fairlead_checkpoint_io.files.snapshot import Arena, OverlappedCopies

_NICER: Final = 10  # where cores are scarce, the steps go first; a loop that waits for a save leaves them all to it

log = logging.getLogger("fairlead.checkpoint_io")


class Background:
    """Buffers, and one thread that writes what was copied into them, in order.

    Both are made by the first save, and by the first one after `close`, or in another process.  Python waits for
    the thread when the interpreter ends, so a save that was accepted is finished even without `close`.
    """

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._idle: list[Arena] = []
        self._overlap = OverlappedCopies()
        self._pid: int | None = None
        self._lock = threading.Lock()
        self._errors: list[tuple[Path, BaseException]] = []
        self._thread: int | None = None
        self._current: Path | None = None
        self._last_save_failed = False

    def begin(self) -> Arena:
        """The buffers for a save; waits, and says so, while too many are unfinished. `save` or `abandon` follows."""
        self._started()
        if not self._slots.acquire(blocking=False):
            log.warning("training waits: %s is still being written", self._current or "the previous checkpoint")
            self._slots.acquire()
        return self._idle.pop() if self._idle else Arena(pin=True, overlap=self._overlap)

    def abandon(self, arena: Arena) -> None:
        """The save that was begun does not come, or has ended."""
        arena.release()
        self._idle.append(arena)
        self._slots.release()

    def save(self, path: Path, write: Callable[[], None], arena: Arena) -> None:
        """Calls `write` in the thread, which waits for `arena`; raises for an earlier save, with this one accepted."""

        def run() -> None:
            self._current = path
            try:
                write()
                self._last_save_failed = False
            except BaseException as error:  # all of it is raised in the thread that trains
                self._last_save_failed = True
                self._failed(path, error)
            finally:
                self._current = None
                self.abandon(arena)

        executor = self._started()
        with self._lock:
            earlier, self._errors = self._errors, []
        executor.submit(run)
        _raise(earlier)  # only now, so that one failure does not cost the next checkpoint too

    def remove(self, path: Path, remove: Callable[[], None]) -> None:
        """Calls `remove` behind the saves so far, unless the newest of them failed."""

        def run() -> None:
            if self._last_save_failed:
                log.warning("%s is retained: the checkpoint after it was not written", path)
                return
            try:
                remove()
            except BaseException as error:  # as in `save`
                self._failed(path, error)

        self._started().submit(run)

    def drain(self) -> None:
        """Returns when the saves so far have ended."""
        if self._pid == os.getpid():
            self._started().submit(lambda: None).result()

    def finish(self) -> None:
        """Returns when the saves so far are durable; raises for those that are not, once for each."""
        self.drain()
        if self._pid == os.getpid():
            errors, self._errors = self._errors, []
            _raise(errors)

    def close(self) -> None:
        """Finishes all saves and frees the buffers; raises as `finish`."""
        errors = []
        if self._pid == os.getpid():
            self._started().shutdown(wait=True)
            errors, self._pid = self._errors, None
        self._idle.clear()
        self._overlap.end()
        _raise(errors)

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process (`ddp_spawn`) go the settings, not the thread."""
        return type(self), (self._max_in_flight,)

    def _started(self) -> ThreadPoolExecutor:
        """The thread; a forked child has no copy of it, and gets its own."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="fairlead-checkpoint", initializer=self._begin)
            self._slots = threading.Semaphore(self._max_in_flight)
            self._lock, self._errors = threading.Lock(), []
            self._thread = self._current = None
            self._last_save_failed = False
        if threading.get_ident() == self._thread:
            raise RuntimeError("a `then` callback must not call the checkpoint backend that runs it")
        return self._executor

    def _begin(self) -> None:
        self._thread = threading.get_ident()
        if sys.platform == "linux":  # elsewhere threads have no priorities
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICER))

    def _failed(self, path: Path, error: BaseException) -> None:
        log.error("%s was not written: %s", path, reason(error))  # at once: the next save may be hours away
        with self._lock:
            self._errors.append((path, error))


def _raise(errors: list[tuple[Path, BaseException]]) -> None:
    """Raises what went wrong as one error, with the paths in `where`."""
    if not errors:
        return
    first = errors[0][1]
    what = "a checkpoint was not written" if len(errors) == 1 else f"{len(errors)} checkpoints were not written"
    raise CheckpointError(
        f"{what} in the background",
        where="\n".join(str(path) for path, _ in errors),
        why="\n".join(dict.fromkeys(reason(error) for _, error in errors)),
        fix=first.fix if isinstance(first, FairleadError) else None,
    ) from first
