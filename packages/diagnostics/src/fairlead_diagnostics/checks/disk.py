"""The folder where runs go: space in it, and a file written, made durable and read back."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Final

from fairlead_diagnostics.checking import Bench, Result

_PIECE: Final = 1 << 20
_PIECES: Final = 4
"""Few: all nodes do this at once."""
_LITTLE: Final = 1 << 30


def existing(folder: str | Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    path = Path(folder).absolute()
    return next(one for one in (path, *path.parents) if one.is_dir())


def space(bench: Bench) -> Result:
    """How much is free where runs go; less than 1 GiB is a warning."""
    folder = existing(str(bench.requested.folder))
    free = shutil.disk_usage(folder).free
    return Result(True, f"{free / (1 << 30):.1f} GiB free in {folder}", warns=free < _LITTLE)


def write(bench: Bench) -> Result:
    """4 MiB are written, made durable by fsync, and read back."""
    folder = Path(str(bench.requested.folder))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f".tmp-doctor-{socket.gethostname()}-{os.getpid()}"
    piece = os.urandom(_PIECE)
    began = time.monotonic()
    try:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for _ in range(_PIECES):
                _all(fd, piece)
                os.fsync(fd)
                bench.progress()
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # from the disk, not from memory
            for number in range(_PIECES):
                if os.pread(fd, _PIECE, number * _PIECE) != piece:
                    return Result(False, f"what was written to {folder} is not what is read back")
                bench.progress()
        finally:
            os.close(fd)
    except OSError as error:
        return Result(False, f"{folder} cannot be written: {error.strerror}")
    finally:
        with contextlib.suppress(OSError):  # the failure is reported above
            file.unlink()
    seconds = time.monotonic() - began
    return Result(True, f"{_PIECES} MiB written, made durable and read back in {folder}", seconds)


def _all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
