"""Every system call by which the commit protocol touches a disk, on one object that tests replace."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

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
