"""A file of `torch.save`, read by several threads which compute its checksums in passing.

`torch.load` reads one record after the other in one thread and compares no checksum.  Here a large record is split
among threads, each of which computes the CRC of its piece while that is still in the processor's cache.
"""

from __future__ import annotations

import ctypes
import io
import os
import struct
import zipfile
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

from zlib_ng import zlib_ng

from fairlead_checkpoint_io.files.snapshot import use_huge_pages

_PIECE: Final = 1 << 22
_FOLDER: Final = 0x10  # of MS-DOS's attributes
_LOCAL_HEADER: Final = struct.Struct("<26xHH")  # its last two numbers: the lengths of the name and of what follows it


class ArchiveReader(io.RawIOBase):
    """The file as `torch.load` wants it; for use in one thread. Raises `BadZipFile` when it is no sound archive."""

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        super().__init__()
        self._file = path.open("rb", buffering=0)
        try:
            self._zip = zipfile.ZipFile(self._file)
            for info in self._zip.infolist():
                if info.external_attr & _FOLDER and info.file_size:  # torch would leave the tensor's memory as it is
                    raise zipfile.BadZipFile(f"{info.filename} calls itself a folder")
        except BaseException:
            self._file.close()
            raise
        self.names = self._zip.namelist()
        self._verify = verify
        self._position = 0
        self._damaged: str | None = None
        self._unread = {info.header_offset: info for info in self._zip.infolist()}
        self._data: dict[int, zipfile.ZipInfo] = {}
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="fairlead-read")

    def damaged_record(self) -> str | None:
        """The name of a record that does not match its checksum; unread records are read now."""
        if not self._verify:
            return None
        while self._unread and self._damaged is None:
            _, info = self._unread.popitem()
            try:
                with self._zip.open(info) as record:
                    while record.read(_PIECE):
                        pass
            except OSError:
                raise
            except Exception:  # a damaged table of contents may say "encrypted", "compressed", or anything else
                self._damaged = info.filename
        return self._damaged

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The position, in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Moves the position; see `io.IOBase.seek`."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position}.get(whence)
        self._position = offset + (os.fstat(self._file.fileno()).st_size if base is None else base)
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Fills a buffer from the position on; short only at the end of the file."""
        view, begin = memoryview(buffer).cast("B"), self._position
        record = self._data.get(begin)
        if record is not None and view.nbytes == record.file_size and record.compress_type == zipfile.ZIP_STORED:
            count, crc = self._in_pieces(view, begin)
            self._unread.pop(record.header_offset, None)
            if self._verify and crc != record.CRC:
                self._damaged = record.filename
        else:
            count = self._fill(view, begin)
            if begin in self._unread and count == _LOCAL_HEADER.size:
                self._data[begin + count + sum(_LOCAL_HEADER.unpack(view))] = self._unread[begin]
        self._position += count
        return count

    def close(self) -> None:
        """Closes the file and ends the threads."""
        if not self.closed:
            self._threads.shutdown()
            self._zip.close()
            self._file.close()
        super().close()

    def _in_pieces(self, view: memoryview, begin: int) -> tuple[int, int]:
        """The number of bytes read, and their CRC."""
        if view.nbytes >= _PIECE:
            use_huge_pages(ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes)
        pieces = [(start, start + _PIECE) for start in range(0, view.nbytes, _PIECE)]

        def read(piece: tuple[int, int]) -> tuple[int, int]:
            part = view[slice(*piece)]
            return self._fill(part, begin + piece[0]), zlib_ng.crc32(part) if self._verify else 0

        if len(pieces) > 1:
            reads = [self._threads.submit(read, piece) for piece in pieces]
            wait(reads)  # all of them, also when one fails: torch frees the buffer as soon as this raises
            found = [one.result() for one in reads]
        else:
            found = [read(piece) for piece in pieces]
        total = crc = 0
        for count, own in found:
            total += count
            crc = zlib_ng.crc32_combine(crc, own, count)
        return total, crc

    def _fill(self, view: memoryview, begin: int) -> int:
        done = 0
        while done < view.nbytes:
            count = os.preadv(self._file.fileno(), [view[done:]], begin + done)
            if not count:
                break
            done += count
        return done
