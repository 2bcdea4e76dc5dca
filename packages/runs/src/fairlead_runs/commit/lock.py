"""A lock on a directory that holds on network file systems, survives crashes and tells who has it.

The lock is a file made with `link(2)`, which NFS too does for one contender only.  Its holder touches it every few
seconds; whoever finds it stale takes it over.  A takeover must not remove the *new* lock of a faster contender, so it
happens under a guard, itself such a lock: the lock is looked at again, and moved away only if it is still the stale
one.  After that everyone is back at `link`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fairlead.errors import RunDirectoryError, RunLockedError
from fairlead_runs.commit.files import disk_error
from fairlead_runs.commit.owner import LockOwner
from fairlead_runs.commit.syscalls import Syscalls

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EOPNOTSUPP}
_GUARD = ".takeover"
_POLL_S = 0.01


@dataclass(frozen=True)
class LockState:
    """A lock file as it was found.

    Attributes:
        owner: Who holds it; None when the file is torn.
        age_s: Seconds since its last heartbeat.
        gone: Why its owner is dead, or None.
        identity: Tells this holder's file from the next one's.
    """

    owner: LockOwner | None
    age_s: float
    gone: str | None
    identity: str


def read_lock(path: Path, *, stale_after_s: float = 120.0) -> LockState | None:
    """Who holds the lock `path`, None when nobody does; writes nothing, so ages are by this host's clock."""
    return _look(path, LockOwner.here(), stale_after_s, time.time)


class Lock:
    """A lock file with owner and heartbeat; one holder at a time.

    Args:
        path: The lock file; its directory exists.
        owner: Who takes it; None: this process.
        interval_s: Seconds between heartbeats.
        stale_after_s: Without a heartbeat for so many seconds the owner counts as dead.  Generous: a process that is
            stopped, or holds the GIL, beats late.
        on_lost: Called from the heartbeat's thread when the lock was taken by someone else all the same.

    Example:
        >>> with Lock(run / ".lock"):                                     # doctest: +SKIP
        ...     train()
    """

    def __init__(
        self,
        path: Path,
        *,
        owner: LockOwner | None = None,
        interval_s: float = 15.0,
        stale_after_s: float = 120.0,
        on_lost: Callable[[], None] | None = None,
        syscalls: Syscalls | None = None,
    ) -> None:
        self.path = path
        self.owner = owner or LockOwner.here()
        self._interval_s = interval_s
        self._stale_after_s = stale_after_s
        self._on_lost = on_lost
        self._system = syscalls or Syscalls()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid: int | None = None
        self._lost = False

    @property
    def held(self) -> bool:
        """Whether this process holds it, as far as it knows; a forked child does not."""
        return self._pid == os.getpid() and not self._lost

    def acquire(self, *, wait_s: float = 0.0) -> None:
        """Takes the lock; waits up to `wait_s` seconds for a living owner.

        Raises:
            RunLockedError: Someone alive holds it; who, where, since when, and what to do.
            RunDirectoryError: The directory is not writable.
        """
        if self.held:
            return
        deadline = time.monotonic() + wait_s
        try:
            while not self._try(self.path):
                state = self._look(self.path)
                if state is not None and state.gone is None and time.monotonic() >= deadline:
                    raise self._locked(state)
                time.sleep(_POLL_S)
        except OSError as error:
            raise disk_error(error, "cannot lock the run directory", self.path, RunDirectoryError) from error
        self._pid, self._lost = os.getpid(), False
        self._stop.clear()
        self._thread = threading.Thread(target=self._beat, name="fairlead-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Gives it back; nothing happens when it is not held, was lost, or this is a forked child."""
        if not self.held:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        try:
            if self._mine():
                self._system.unlink(self.path)
        except FileNotFoundError:
            pass  # the directory was deleted: nothing is held
        except OSError as error:
            raise disk_error(error, "cannot release the run directory", self.path, RunDirectoryError) from error
        finally:
            self._pid = None

    def check(self) -> None:
        """Call before something that only the holder may do, such as publishing a checkpoint.

        Raises:
            RunLockedError: This process was stopped for so long that another took over, or someone deleted the file.
        """
        if self.held and self._mine():
            return
        state = self._look(self.path)
        raise RunLockedError(
            "this run lost its run directory to another process",
            where=str(self.path),
            why=f"it is held by {state.owner}" if state and state.owner else "its lock file is gone",
            fix="stop this run; it must not write there any more",
        )

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _try(self, path: Path, depth: int = 0) -> bool:
        """One attempt: take it, or clear a stale one out of the way; whether it is ours now."""
        temporary = path.with_name(f".lock-{secrets.token_hex(6)}")
        try:
            if self._create(temporary, path):
                return True
        finally:
            with contextlib.suppress(FileNotFoundError):
                self._system.unlink(temporary)
        state = self._look(path)
        if state is not None and state.gone is not None and depth < 3:
            guard = path.with_name(path.name + _GUARD)
            if self._try(guard, depth + 1):
                try:
                    self._displace(path, state)
                finally:
                    with contextlib.suppress(FileNotFoundError):
                        self._system.unlink(guard)
        return False

    def _create(self, temporary: Path, path: Path) -> bool:
        """Makes the lock file with its content in it at once."""
        self._write(temporary)
        try:
            self._system.link(temporary, path)
        except FileExistsError:
            return os.stat(temporary).st_nlink == 2  # NFS: the first answer was lost, the repeat says "exists"
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                self._write(path)
            except FileExistsError:
                return False
        return True

    def _write(self, path: Path) -> None:
        fd = self._system.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            self._system.write(fd, memoryview(self.owner.dump()))
            self._system.fsync(fd)
        finally:
            self._system.close(fd)

    def _displace(self, path: Path, stale: LockState) -> None:
        """Under the guard: moves the stale lock away, if it is still that one."""
        now = self._look(path)
        if now is None or now.identity != stale.identity or now.gone is None:
            return
        away = path.with_name(f".lock-{secrets.token_hex(6)}")
        self._system.rename(path, away)
        moved = self._look(away)
        if moved is not None and moved.identity != stale.identity:
            # The owner was alive after all and let go, and a new one came, between the two calls above.
            with contextlib.suppress(FileExistsError):
                self._system.link(away, path)
        self._system.unlink(away)

    def _look(self, path: Path) -> LockState | None:
        return _look(path, self.owner, self._stale_after_s, lambda: _clock(path.parent, self._system))

    def _mine(self) -> bool:
        try:
            owner = LockOwner.load(self.path.read_bytes())
        except FileNotFoundError:
            return False
        return owner is not None and owner.nonce == self.owner.nonce

    def _beat(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                mine = self._mine()
                if mine:
                    self._system.touch(self.path)
            except FileNotFoundError:
                mine = False
            except OSError:
                continue  # a hiccup of the file system: the next beat may pass; if none does, others take over
            if not mine:
                self._lost = True
                if self._on_lost is not None:
                    self._on_lost()
                return

    def _locked(self, state: LockState) -> RunLockedError:
        owner = state.owner
        cancel = f" ({owner.cancel})" if owner and owner.cancel else ""
        return RunLockedError(
            "another job is using this run directory",
            where=str(self.path),
            why=f"held by {owner or 'a process that is just taking it'}; last sign of life {state.age_s:.0f} s ago",
            fix=f"wait for it or stop it{cancel}, set another run.name, or use --resume never for a sibling directory; "
            f"if you are sure that it is dead: rm '{self.path}'",
        )


def _look(path: Path, me: LockOwner, stale_after_s: float, clock: Callable[[], float]) -> LockState | None:
    try:
        fd = os.open(path, os.O_RDONLY)  # opening makes NFS ask the server, which its attribute cache would not
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        content, status = os.read(fd, 65536), os.fstat(fd)
    finally:
        os.close(fd)
    owner = LockOwner.load(content)
    age = max(0.0, clock() - status.st_mtime)  # a clock that went backwards makes a lock young, never stale
    gone = owner.is_gone(me) if owner else None
    if gone is None and age > stale_after_s:
        gone = f"no sign of life for {age:.0f} s"
    return LockState(owner, age, gone, owner.nonce if owner else f"{status.st_ino} {status.st_mtime_ns}")


def _clock(directory: Path, system: Syscalls) -> float:
    """The file system's own time; the hosts that share it may disagree about theirs."""
    probe = directory / f".lock-{secrets.token_hex(6)}"
    fd = system.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        return os.fstat(fd).st_mtime
    finally:
        system.close(fd)
        system.unlink(probe)
