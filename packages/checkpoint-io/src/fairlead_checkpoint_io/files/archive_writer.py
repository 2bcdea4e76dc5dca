"""An archive of `torch.save`, whose checksums are computed on its way to the disk, several times as fast as torch does.

torch computes the CRC of a record before it hands the record over, a quarter of a second for a GiB.  So it is made to
leave the CRCs out, and they are filled in on the way, in strides that the file's own checksum and the kernel then find
in the cache: a record's CRC stands behind the record, and once more in the table of contents at the end.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import IO, Final, Protocol, cast

import torch
from torch.serialization import get_crc32_options, set_crc32_options
from torch.utils import _config_module
from zlib_ng import zlib_ng

from fairlead.errors import CheckpointError

_STRIDE: Final = 2 << 20
_LOCAL_HEADER: Final = struct.Struct("<4s2xH18xHH")  # signature, flags, lengths of the name and of what follows it
_HAS_DESCRIPTOR: Final = 8  # a flag: the record has bytes, and what describes them stands behind them
_DESCRIPTORS: Final = {16: struct.Struct("<4sIII"), 24: struct.Struct("<4sIQQ")}  # signature, CRC, both sizes
_TABLE_ENTRY: Final = struct.Struct("<4s12xI8xHHH12x")  # signature, CRC, lengths of the name and of two more fields
_CRC_OF_ENTRY: Final = slice(16, 20)
_IDENTIFIER: Final = b"/.data/serialization_id"
_HALF: Final = 20  # the digits of the identifier that are made of the names; as many are made of the CRCs
_WORD: Final = (1 << 64) - 1


class _File(Protocol):
    def write(self, data: memoryview, /) -> int: ...
    def flush(self) -> None: ...


class ArchiveWriter:
    """Writes values as `torch.save` does, byte for byte, one archive behind the other."""

    def __init__(self, file: _File) -> None:
        self._file = file
        # Else torch computes the checksums: so that the files which other threads save meanwhile have theirs, too.
        self._fill_in = _options_are_of_one_thread() and _layout_is_known()

    def add(self, value: object) -> None:
        """Appends one archive; raises whatever the value's own methods raise when it is pickled."""
        _save(value, self._file, fill_in=self._fill_in)


def _save(value: object, file: _File, *, fill_in: bool) -> None:
    sink = _Sink(file, fill_in=fill_in)
    before = get_crc32_options()
    # Of this thread only.  What an object saves into bytes while it is pickled has none either; torch.load never looks.
    set_crc32_options(not fill_in)
    try:
        torch.save(value, cast("IO[bytes]", sink))
    except Exception as error:
        if sink.error is None or sink.error is error:
            raise
        raise sink.error from error  # torch hides the first error behind one of its writer
    finally:
        sink.open = False
        set_crc32_options(before)


def _options_are_of_one_thread() -> bool:
    """Whether `set_crc32_options` leaves other threads alone, as it does from torch 2.12 on."""
    return "ContextVar" in vars(_config_module)


def _layout_is_known() -> bool:
    sample = {"tensor": torch.zeros(3, device="cpu"), "empty": torch.zeros(0, device="cpu")}
    filled_in, plain = io.BytesIO(), io.BytesIO()
    _save(sample, plain, fill_in=False)
    try:
        _save(sample, filled_in, fill_in=True)
    except CheckpointError:
        return False
    return filled_in.getvalue() == plain.getvalue()


class _Sink:
    """Passes on what torch writes, field by field, until the first error and no longer than the save lasts.

    After an error torch's writer continues, and once more when it is collected: by then the number of the file
    descriptor may belong to another file.
    """

    def __init__(self, file: _File, *, fill_in: bool) -> None:
        self.open = True
        self.error: Exception | None = None
        self._file = file
        self._take: Callable[[_Sink, memoryview], None] = _Sink._header if fill_in else _Sink._unchanged
        self._name_length = self._front_length = 0
        self._front = bytearray()
        self._has_data = False
        self._size = self._crc = 0
        self._crcs: list[int] = []
        self._combined = 0

    def write(self, data: memoryview) -> int:
        if not self.open:
            raise OSError("the save has ended")
        self.open = False
        try:
            view = memoryview(data).cast("B")
            self._take(self, view)
        except Exception as error:
            self.error = error
            raise
        self.open = True
        return view.nbytes

    def flush(self) -> None:
        if self.open:
            self._file.flush()

    def _unchanged(self, view: memoryview) -> None:
        self._file.write(view)

    def _header(self, view: memoryview) -> None:
        if bytes(view[:4]) == b"PK\x01\x02":
            self._table(view)
            return
        _expect(view.nbytes == _LOCAL_HEADER.size and bytes(view[:4]) == b"PK\x03\x04")
        _, flags, self._name_length, behind_it = _LOCAL_HEADER.unpack(view)
        self._has_data = bool(flags & _HAS_DESCRIPTOR)
        self._front_length = self._name_length + behind_it
        self._front.clear()
        self._file.write(view)
        self._take = _Sink._name_and_padding

    def _name_and_padding(self, view: memoryview) -> None:
        self._front += view
        _expect(len(self._front) <= self._front_length)
        self._file.write(view)
        if len(self._front) == self._front_length:
            self._take = _Sink._data if self._has_data else _Sink._header
            if not self._has_data:
                self._crcs.append(0)

    def _data(self, view: memoryview) -> None:
        self._size, self._crc = view.nbytes, 0
        if self._front[: self._name_length].endswith(_IDENTIFIER):
            _expect(view.nbytes == 2 * _HALF)
            view = memoryview(view[:_HALF].tobytes() + b"%0*d" % (_HALF, self._combined))
        elif view.nbytes >= 8 and bytes(view[:4]) == b"PK\x07\x08":
            # torch takes a tensor that begins so for a descriptor
            self._combine(int.from_bytes(view[4:8], "little"))
        for begin in range(0, view.nbytes, _STRIDE):
            stride = view[begin : begin + _STRIDE]
            self._crc = zlib_ng.crc32(stride, self._crc)
            self._file.write(stride)
        self._take = _Sink._descriptor

    def _descriptor(self, view: memoryview) -> None:
        layout = _DESCRIPTORS.get(view.nbytes)
        _expect(layout is not None and layout.unpack(view) == (b"PK\x07\x08", 0, self._size, self._size))
        self._combine(self._crc)
        self._crcs.append(self._crc)
        self._file.write(memoryview(view[:4].tobytes() + self._crc.to_bytes(4, "little") + view[8:].tobytes()))
        self._take = _Sink._header

    def _combine(self, crc: int) -> None:
        """As torch does, for the identifier of the archive."""
        before = self._combined
        self._combined = before ^ ((crc + 0x9E3779B9 + (before << 6) + (before >> 2)) & _WORD)

    def _table(self, view: memoryview) -> None:
        table = bytearray(view)
        begin = 0
        for crc in self._crcs:
            _expect(begin + _TABLE_ENTRY.size <= len(table))
            signature, empty, *lengths = _TABLE_ENTRY.unpack_from(table, begin)
            _expect(signature == b"PK\x01\x02" and not empty)
            memoryview(table)[begin:][_CRC_OF_ENTRY] = crc.to_bytes(4, "little")
            begin += _TABLE_ENTRY.size + sum(lengths)
        _expect(begin == len(table))
        self._file.write(memoryview(table))
        self._take = _Sink._unchanged


def _expect(known: bool) -> None:
    if not known:
        raise CheckpointError(
            "this version of torch lays out its archives in a way that this version of Fairlead does not know",
            why=f"torch {torch.__version__}",
            fix="upgrade Fairlead, or install an older torch",
        )
