"""Single files: written durably, replaced atomically, deleted without a half-way state."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import importlib.util
import os
import secrets
import stat
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fairlead.errors import CheckpointError, FairleadError, MissingDependencyError
from fairlead_runs.commit.fence import Fence

_BUFFER = 1 << 20
_PIECE = 16 << 20
_TEMPORARY = ".tmp-"

_ADVICE = {
    errno.ENOSPC: "free some space, or put run.dir on another file system",
    errno.EDQUOT: "your quota is used up: delete something, or put run.dir on another file system",
    errno.EROFS: "the file system is read-only: put run.dir somewhere else",
    errno.EACCES: "check the permissions of the directory, or put run.dir somewhere else",
    errno.EPERM: "check the permissions of the directory, or put run.dir somewhere else",
    errno.ENOENT: "the directory was deleted or moved: do not touch a run directory while its run is alive",
    errno.ESTALE: "the network file system dropped the directory: check its server",
    errno.EIO: "the disk or its server is failing: check the kernel's log, put run.dir on another file system",
    errno.ENOTDIR: "a file is in the way of the directory: move it away, or choose another run.dir or run.name",
    errno.ENAMETOOLONG: "choose a shorter run.name or run.dir",
}


class FileWriter:
    """A write-only binary file that hashes what passes: give it to `torch.save`, `pickle.dump`, ...

    Small writes are gathered, large ones not copied.  The disk begins while the next pieces are still being hashed, so
    that the fsync at the end finds little to do.
    """

    def __init__(self, fd: int, algorithm: str, syscalls: Syscalls) -> None:
        self._fd = fd
        self._system = syscalls
        self._algorithm = algorithm
        self._hasher = new_hasher(algorithm)
        self._pending = bytearray()
        self._size = 0
        self._written = 0
        self._started = 0
        self.error: OSError | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Takes the next bytes; returns how many they were."""
        view = memoryview(data)
        count = view.nbytes
        if count + len(self._pending) < _BUFFER:
            self._pending += view
        else:
            self.flush()
            self._emit(view)
        self._size += count
        return count

    def tell(self) -> int:
        """How many bytes have been written."""
        return self._size

    def flush(self) -> None:
        """Hands what was gathered to the kernel."""
        if self._pending:
            pending, self._pending = self._pending, bytearray()
            self._emit(memoryview(pending))

    def hash(self) -> FileHash:
        """The checksum of all bytes written so far."""
        self.flush()
        return FileHash(self._algorithm, self._hasher.hexdigest(), self._size)

    def _emit(self, view: memoryview) -> None:
        if not view.nbytes:
            return
        view = view.cast("B")
        try:
            for begin in range(0, view.nbytes, _PIECE):
                self._emit_piece(view[begin : begin + _PIECE])
        except OSError as error:
            self.error = self.error or error
            raise

    def _emit_piece(self, view: memoryview) -> None:
        self._hasher.update(view)
        while view.nbytes:
            count = self._system.write(self._fd, view)
            self._written += count
            view = view[count:]
        if self._written - self._started >= _PIECE:
            self._system.start_writeback(self._fd, self._started, self._written - self._started)
            self._started = self._written


def write_all(system: Syscalls, fd: int, data: bytes) -> None:
    """Writes all of it, however little a call takes."""
    view = memoryview(data)
    while view:
        view = view[system.write(fd, view) :]


Content = bytes | bytearray | memoryview | Callable[[FileWriter], object]


def disk_error(
    error: OSError, what: str, path: Path | str, kind: type[FairleadError] = CheckpointError
) -> FairleadError:
    """The user's error for an `OSError`: what was being done, where, why, and what to do about it."""
    advice = _ADVICE.get(error.errno or 0)
    return kind(what, where=str(path), why=error.strerror or str(error), fix=advice)


def write_file(
    path: Path, content: Content, *, algorithm: str | None = None, syscalls: Syscalls | None = None
) -> FileHash:
    """Writes one file of a stage and fsyncs it; on an error nothing is left behind.

    Args:
        path: A path inside a stage; an old file of that name is overwritten.
        content: The bytes, or a function that writes them to the `FileWriter` it is given.
        algorithm: The checksum; None: the fastest that is installed.

    Returns:
        The checksum, computed in passing, for `publish(hashes=...)`.
    """
    system = syscalls or Syscalls()
    try:
        return _write(path, content, os.O_TRUNC, algorithm, system)
    except OSError as error:
        raise disk_error(error, f"cannot write {path.name}", path) from error


def atomic_write(
    path: Path,
    content: Content,
    *,
    algorithm: str = "crc32",
    error: type[FairleadError] = CheckpointError,
    syscalls: Syscalls | None = None,
    fence: Fence | None = None,
) -> FileHash:
    """Replaces a single file atomically: readers, and a power failure at any time, find the old or the new one.

    Returns its checksum. Where the disk refuses, it raises `error`, and the old file is untouched; so it is where the
    `fence` says that another start owns the run.
    """
    try:
        return replace_file(path, content, algorithm=algorithm, syscalls=syscalls, fence=fence)
    except OSError as failure:
        raise disk_error(failure, f"cannot write {path.name}", path, error) from failure


def replace_file(
    path: Path,
    content: Content,
    *,
    algorithm: str = "crc32",
    mode: int = 0o666,
    syscalls: Syscalls | None = None,
    fence: Fence | None = None,
) -> FileHash:
    """`atomic_write`, for who has an error of their own for what the disk says: raises `OSError`."""
    system = syscalls or Syscalls()
    temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(6)}")
    digest = _write(temporary, content, os.O_EXCL, algorithm, system, mode)
    try:
        fenced_rename(temporary, path, system, fence)
    except (OSError, FairleadError):
        with contextlib.suppress(OSError):
            system.unlink(temporary)
        raise
    system.fsync_dir(path.parent)
    return digest


def fenced_rename(source: Path, target: Path, system: Syscalls, fence: Fence | None) -> None:
    """Renames what was written under a name of this start only, if it still owns the run.

    Where another start took it over between the look and the rename, it has taken the source away before.
    """
    if fence is not None:
        fence.check()
    try:
        system.rename(source, target)
    except FileNotFoundError:
        if fence is not None:
            fence.check()
        raise


def ensure_dir(path: Path, syscalls: Syscalls) -> None:
    """Makes a directory and its parents, each durable, where they are missing; raises `OSError`."""
    if path.is_dir():
        return
    if path.parent != path:
        ensure_dir(path.parent, syscalls)
    try:
        syscalls.mkdir(path)
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
        return
    syscalls.fsync_dir(path.parent)


def remove_tree(path: Path, syscalls: Syscalls) -> None:
    """Deletes a directory or file and all below it; what is already gone is no error, links are not followed."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            for name in sorted(os.listdir(path)):
                remove_tree(path / name, syscalls)
            syscalls.rmdir(path)
        else:
            syscalls.unlink(path)
    except FileNotFoundError:
        return


def _call(content: Callable[[FileWriter], object], writer: FileWriter) -> None:
    try:
        content(writer)
    except Exception as error:
        if writer.error is None or writer.error is error:
            raise
        raise writer.error from error  # torch.save hides "disk full" behind an error of its zip writer
    if writer.error is not None:
        raise writer.error


def _write(
    path: Path, content: Content, flags: int, algorithm: str | None, system: Syscalls, mode: int = 0o666
) -> FileHash:
    fd = system.open(path, os.O_WRONLY | os.O_CREAT | flags, mode)
    closing = True
    try:
        writer = FileWriter(fd, algorithm or default_algorithm(), system)
        if callable(content):
            _call(content, writer)
        else:
            writer.write(content)
        digest = writer.hash()
        system.fsync(fd)
        closing = False
        system.close(fd)  # network file systems report a full disk or quota only here
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            if closing:
                system.close(fd)
        with contextlib.suppress(OSError):
            system.unlink(path)
        raise
    return digest


_CHUNK = 4 << 20


class Hasher(Protocol):
    """What `hashlib` objects are, as far as it is needed here."""

    def update(self, data: memoryview, /) -> None:
        """Takes the next bytes."""

    def hexdigest(self) -> str:
        """The digest of all bytes so far, in hexadecimal."""


@dataclass(frozen=True)
class FileHash:
    """The checksum of one file and its size in bytes."""

    algorithm: str
    digest: str
    size: int


class _CRC32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def _xxh3_128() -> Hasher:
    try:
        xxhash = importlib.import_module("xxhash")
    except ImportError as error:
        raise MissingDependencyError(
            "the checksum 'xxh3_128' needs the package xxhash, which is not installed",
            why=str(error),
            fix="pip install xxhash",
        ) from error
    hasher: Hasher = xxhash.xxh3_128()
    return hasher


ALGORITHMS: dict[str, Callable[[], Hasher]] = {"xxh3_128": _xxh3_128, "crc32": _CRC32, "sha256": hashlib.sha256}


def default_algorithm() -> str:
    """The fastest algorithm that is installed: `xxh3_128`, else `crc32`."""
    return "xxh3_128" if importlib.util.find_spec("xxhash") else "crc32"


def new_hasher(algorithm: str) -> Hasher:
    """A hasher; `CheckpointError`: only a newer Fairlead has it, `MissingDependencyError`: its package is lacking."""
    if algorithm not in ALGORITHMS:
        raise CheckpointError(
            f"unknown checksum algorithm {algorithm!r}",
            why=f"this version knows {', '.join(sorted(ALGORITHMS))}",
            fix="upgrade Fairlead",
        )
    return ALGORITHMS[algorithm]()


def hash_file(
    path: Path, algorithm: str | None = None, *, sync: bool = False, syscalls: Syscalls | None = None
) -> FileHash:
    """Reads a file once and hashes it; with `sync`, it is fsynced first.  `OSError`: it cannot be read."""
    system = syscalls or Syscalls()
    name = algorithm or default_algorithm()
    hasher, size = new_hasher(name), 0
    buffer = memoryview(bytearray(_CHUNK))
    fd = system.open(path, os.O_RDONLY)
    try:
        if sync:
            system.fsync(fd)
        while count := system.readinto(fd, buffer):
            hasher.update(buffer[:count])
            size += count
    finally:
        system.close(fd)
    return FileHash(name, hasher.hexdigest(), size)


# What a directory's fsync answers on file systems that have no such thing (some FUSE and SMB mounts).
_NO_DIRECTORY_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}


class Syscalls:
    """The operating system, one method a call; each raises `OSError` as the call does.

    A subclass that fails, dies or records at the n-th call is how the protocol is tested.
    """

    def open(self, path: Path, flags: int, mode: int = 0o666) -> int:
        """`open(2)`; the descriptor is not inherited by children."""
        return os.open(path, flags, mode)

    def readinto(self, fd: int, buffer: memoryview) -> int:
        """`read(2)` into a buffer; the number of bytes, 0 at the end."""
        return os.readv(fd, [buffer])

    def write(self, fd: int, data: memoryview) -> int:
        """`write(2)`; may write less than it was given."""
        return os.write(fd, data)

    def start_writeback(self, fd: int, offset: int, nbytes: int) -> None:
        """Has the kernel begin to write a range to the disk, and does not wait; where that is not known, nothing.

        `posix_fadvise(2)` with "not needed": Linux then writes what is dirty, and drops from memory what is not.
        """
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # advice: the fsync that follows reports what the disk refuses
                os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def fsync(self, fd: int) -> None:
        """`fsync(2)` of a file: its bytes survive a power cut from here on."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """`close(2)`."""
        os.close(fd)

    def fsync_dir(self, path: Path) -> None:
        """`fsync(2)` of a directory: the names in it survive a power cut from here on."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_FSYNC:
                raise
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """`rename(2)`: atomic; replaces a file, refuses a non-empty directory."""
        os.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        """`link(2)`: fails when the target exists, on network file systems too."""
        os.link(source, target)

    def symlink(self, target: str, link: Path) -> None:
        """`symlink(2)`: a name that leads to another one beside it."""
        os.symlink(target, link)

    def unlink(self, path: Path) -> None:
        """`unlink(2)`."""
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        """`mkdir(2)`: fails when the path exists, so it also decides races."""
        os.mkdir(path)

    def rmdir(self, path: Path) -> None:
        """`rmdir(2)`."""
        os.rmdir(path)

    def touch(self, path: Path) -> None:
        """`utime(2)` with the file system's own clock."""
        os.utime(path)
