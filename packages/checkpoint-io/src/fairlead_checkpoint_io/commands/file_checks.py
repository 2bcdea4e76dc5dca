"""What `fairlead checkpoint verify` does with one file, and how far it is."""

from __future__ import annotations

import json
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

from fairlead.errors import CheckpointError, MissingDependencyError
from fairlead.install import install_line
from fairlead_checkpoint_io.checkpoint_format import Verified
from fairlead_checkpoint_io.commands.sources import size_text
from fairlead_runs.commit import Syscalls

_CHUNK: Final = 4 << 20
_REDRAW_S: Final = 0.1
_WIDTH: Final = 30


class ProgressReader(Syscalls):
    """Counts what is read of `total` bytes, and draws that as a bar on a terminal."""

    def __init__(self, total: int, stream: IO[str] | None) -> None:
        self._total, self._stream = total, stream
        self._done, self._drawn = 0, 0.0
        self._lock = threading.Lock()

    def readinto(self, fd: int, buffer: memoryview) -> int:
        """As `Syscalls.readinto`."""
        count = super().readinto(fd, buffer)
        self.add(count)
        return count

    def add(self, count: int) -> None:
        """Counts bytes; redraws a bar on a terminal, ten times a second at most."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if self._stream is not None and now - self._drawn >= _REDRAW_S:
                self._drawn = now
                part = min(1.0, self._done / self._total) if self._total else 1.0
                bar = "#" * int(part * _WIDTH)
                done = f"{size_text(self._done)} of {size_text(self._total)}"
                print(f"\r[{bar:<{_WIDTH}}] {part:4.0%} {done} ", end="", file=self._stream, flush=True)

    def close_bar(self) -> None:
        """Takes the bar off the terminal."""
        if self._stream is not None:
            print(f"\r{'':<{_WIDTH + 40}}\r", end="", file=self._stream, flush=True)


def verify_archive(path: Path, count: Callable[[int], None]) -> Verified:
    """A file of torch.save: the checksum of each record."""
    if zipfile.is_zipfile(path):
        problem = _archive_problem(path, count)
        return Verified("the checksums inside the file", {path.name: problem} if problem else {})
    with path.open("rb") as file:
        if file.read(2) == b"PK":
            return Verified("", {path.name: "its end is missing: it was cut off"})
    return Verified("nothing was compared: files of torch before 1.6 hold no checksums", {})


def _archive_problem(path: Path, count: Callable[[int], None]) -> str | None:
    """The first record whose checksum is wrong."""
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                try:
                    with archive.open(info) as record:
                        while chunk := record.read(_CHUNK):
                            count(len(chunk))
                except (zipfile.BadZipFile, NotImplementedError, EOFError):
                    return f"its record {info.filename} does not match its checksum"
    except (zipfile.BadZipFile, NotImplementedError) as error:
        return str(error)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None


def verify_safetensors(path: Path, count: Callable[[int], None]) -> Verified:
    """A file of safetensors: its size, and what its header says of it."""
    size = path.stat().st_size
    count(size)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            wanted = 8 + length + max(ends, default=0)
            problem = None if size == wanted else f"{size} bytes, should be {wanted}"
        except (ValueError, KeyError, TypeError, IndexError):
            problem = "its header is damaged"
    return Verified("its size against its header; it holds no checksums", {path.name: problem} if problem else {})


def verify_shards(path: Path, count: Callable[[int], None]) -> Verified:
    """A distributed folder without a manifest: the sizes of its files, which torch's own `.metadata` knows."""
    try:
        from fairlead_checkpoint_io.files.shards import Shards
    except ImportError as error:
        raise MissingDependencyError(
            "verifying a distributed checkpoint without a manifest needs torch",
            where=str(path),
            why="which files it has is in torch's own .metadata",
            fix=install_line("lightning"),
        ) from error
    try:
        damage = Shards(path).wrong_files()
    except CheckpointError as error:
        damage = {".metadata": error.why or error.what}
    return Verified("sizes only: without a manifest there are no checksums", damage)
