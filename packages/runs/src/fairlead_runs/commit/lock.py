"""A lock on a directory that holds on network file systems, survives crashes and tells who has it.

The lock is a file made with `link(2)`, which NFS too does for one contender only.  Its holder touches it every few
seconds; whoever finds it stale takes it over.  A takeover must not remove the *new* lock of a faster contender, so it
happens under a guard, itself such a lock: the lock is reread, and moved away only if it is still the stale
one.  After that everyone is back at `link`.  What keeps out an owner that wakes after that is the `Fence`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fairlead.errors import RunDirectoryError, RunLockedError
from fairlead_runs.commit.fence import Fence, LockOwner
from fairlead_runs.commit.files import Syscalls, disk_error, write_all

log = logging.getLogger("fairlead.runs")

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EOPNOTSUPP}
_GUARD = ".takeover"
_POLL_S = 0.01
_LISTEN_S = 1.0
"""Seconds between two looks at a lock that is waited for."""


@dataclass(frozen=True)
class LockState:
    """A lock file as it was found.

    Attributes:
        owner: Who holds it; None when the file is torn.
        age_s: Seconds since its last heartbeat.
        gone: Why its owner is dead, or None.
        identity: Tells this holder's file from the next one's.
        beat_ns: When it was last touched; another value than before is a sign of life.
    """

    owner: LockOwner | None
    age_s: float
    gone: str | None
    identity: str
    beat_ns: int

    def __str__(self) -> str:
        return f"held by {self.owner or 'a process that is just taking it'}; last sign of life {self.age_s:.0f} s ago"


def read_lock(path: Path, *, stale_after_s: float = 120.0) -> LockState | None:
    """Who holds the lock `path`, None: it is free; writes nothing, so ages are by this host's clock."""
    return _look(path, LockOwner.here(), stale_after_s, time.time)


class Lock:
    """A lock file with owner and heartbeat; one holder at a time.

    Args:
        path: The lock file; its directory exists.
        owner: Who takes it; None: this process.
        interval_s: Seconds between heartbeats.
        stale_after_s: Without a heartbeat for so many seconds the owner counts as dead.  Generous: a process that is
            stopped, or holds the GIL, beats late.

    Attributes:
        fence: What its holder checks before each change; it knows when the lock was lost.
        took_over: Whose lock was taken over, and why, or None.

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
        syscalls: Syscalls | None = None,
    ) -> None:
        self.path = path
        self.owner = owner or LockOwner.here()
        self.fence = Fence(path, self.owner.nonce)
        self.took_over: str | None = None
        self._interval_s = interval_s
        self._stale_after_s = stale_after_s
        self._system = syscalls or Syscalls()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid: int | None = None
        self._ended: dict[str, str | None] = {}

    @property
    def held(self) -> bool:
        """Whether this process holds it, as far as it knows; a forked child does not."""
        return self._pid == os.getpid() and self.fence.lost is None

    def acquire(self, *, wait: bool = False, ended: Callable[[LockOwner], str | None] | None = None) -> None:
        """Takes the lock, at once also that of an owner that is known to be dead, or has `ended` as this says.

        With `wait`, an owner that says nothing is given `stale_after_s` for a sign of life: one that gives it is
        alive, and this start is refused; one that does not is taken over.

        Raises:
            RunLockedError: Someone alive holds it; who, where, since when, and what to do.
            RunDirectoryError: The directory is not writable.
        """
        if self.held:
            return
        first, deadline = None, 0.0
        try:
            while not self._try(self.path):
                state = self._look(self.path)
                if state is None or state.gone is not None:
                    time.sleep(_POLL_S)
                    continue
                if ended is not None and state.owner is not None and state.identity not in self._ended:
                    self._ended[state.identity] = ended(state.owner)
                    continue
                if first is None and wait:
                    first, deadline = state, time.monotonic() + self._stale_after_s + _LISTEN_S
                    log.warning("%s", self._waiting(state))
                if first is None or _lives(first, state) or time.monotonic() > deadline:
                    raise self._locked(state)
                time.sleep(_LISTEN_S)
        except OSError as error:
            raise disk_error(error, "cannot lock the run directory", self.path, RunDirectoryError) from error
        self._pid, self.fence = os.getpid(), Fence(self.path, self.owner.nonce)
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
            self.fence.check()
            try:
                self._take_away(self.path, self.owner.nonce)
            except FileNotFoundError:
                raise
            except OSError:
                self._system.unlink(self.path)  # a full disk has room for no new name, and needs none for this
        except RunLockedError:
            pass  # it was lost just now: there is nothing to give back
        except FileNotFoundError:
            pass  # the directory was deleted: nothing is held
        except OSError as error:
            raise disk_error(error, "cannot release the run directory", self.path, RunDirectoryError) from error
        finally:
            self._pid = None

    def began(self, start: int) -> None:
        """Writes the number of the start into the file, if it is still this holder's; raises `OSError`."""
        owner = replace(self.owner, start=start)
        fd = self._system.open(self.path, os.O_RDWR)
        try:
            # In place: the file of another one, which may come now, is another file.
            found = LockOwner.load(os.pread(fd, 65536, 0))
            if found is not None and found.nonce == owner.nonce:
                write_all(self._system, fd, owner.dump())
        finally:
            self._system.close(fd)
        self.owner = owner

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
                    now = self._look(path)
                    if now is not None and now.identity == state.identity and now.gone is not None:
                        self._take_away(path, state.identity)
                        if depth == 0:
                            self.took_over = f"{state.owner or 'a process that was just taking it'}: {now.gone}"
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
            write_all(self._system, fd, self.owner.dump())
            self._system.fsync(fd)
        finally:
            self._system.close(fd)

    def _take_away(self, path: Path, identity: str) -> None:
        """Removes the lock of this holder, which may be another one's by now: that is put back."""
        away = path.with_name(f".lock-{secrets.token_hex(6)}")
        self._system.rename(path, away)
        moved = self._look(away)
        if moved is not None and moved.identity != identity:
            # Between the last look and the rename, that holder let go or was taken over, and a new one came.
            with contextlib.suppress(FileExistsError):
                self._system.link(away, path)
        self._system.unlink(away)

    def _look(self, path: Path) -> LockState | None:
        state = _look(path, self.owner, self._stale_after_s, lambda: _clock(path.parent, self._system))
        ended = self._ended.get(state.identity) if state is not None and state.gone is None else None
        return replace(state, gone=ended) if state is not None and ended is not None else state

    def _beat(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self.fence.check()
                self._system.touch(self.path)
            except RunLockedError:
                return  # who changes the run finds it in the fence
            except OSError:
                continue  # a hiccup of the file system: the next beat may pass; if none does, others take over

    def _waiting(self, state: LockState) -> str:
        left = max(0.0, self._stale_after_s - state.age_s)
        return f"waiting, {self.path} is {state}; without another one it is taken over in {left:.0f} s"

    def _locked(self, state: LockState) -> RunLockedError:
        owner = state.owner
        if owner is not None and owner.job is not None and owner.job == self.owner.job:
            who, fix = "another process of this same job", "start the run once in a job, or set another run.name"
        else:
            cancel = f" ({owner.cancel})" if owner and owner.cancel else ""
            who, fix = "another job", f"wait for it or stop it{cancel}, or set another run.name"
        return RunLockedError(
            f"{who} is using this run directory",
            where=str(self.path),
            why=str(state),
            fix=f"{fix}, or use --resume never for a sibling directory; if it was killed on another host, "
            f"--wait takes over once it was silent for {self._stale_after_s:.0f} s",
        )


def _lives(first: LockState, now: LockState) -> bool:
    """Whether somebody has given a sign of life between two looks: this owner, or a new one."""
    return (first.identity, first.beat_ns) != (now.identity, now.beat_ns)


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
    identity = owner.nonce if owner else f"{status.st_ino} {status.st_mtime_ns}"
    return LockState(owner, age, gone, identity, status.st_mtime_ns)


def _clock(directory: Path, system: Syscalls) -> float:
    """The file system's own time; the hosts that share it may disagree about theirs."""
    probe = directory / f".lock-{secrets.token_hex(6)}"
    fd = system.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        return os.fstat(fd).st_mtime
    finally:
        system.close(fd)
        system.unlink(probe)
