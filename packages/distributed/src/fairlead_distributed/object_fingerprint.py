"""Whether an object has changed, also in place, whatever it is made of: a checksum of its pickle."""

from __future__ import annotations

import io
import marshal
import pickle
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from fairlead_distributed.plain_data import ATOMS, is_engines, is_stateful

_READ: Final = 1 << 26  # bytes of a tensor or an array; of a larger one, pieces that lie evenly in it
_PIECES, _PIECE = 1 << 12, 1 << 12
_LONG: Final = 1 << 8  # items of a container that is read at once, if it holds Python's own data only
_ONLY_WHICH: Final = (type, ModuleType, BuiltinFunctionType, DataLoader, Sampler)
_CONTAINERS: Final = (list, tuple, dict, set, frozenset, deque)
_LOOKED_INTO: Final = (nn.Module, Dataset, *_CONTAINERS)  # of an engine's: Lightning's hyperparameters are a dict


def fingerprint(value: Any, apart: Mapping[int, object]) -> object:
    """Equal to that of an earlier moment of this process if the object has not changed.

    One that cannot be read equals none: whether it has changed is not known. Of an open file, a lock, an object of an
    engine's without a state, and of those in `apart`, by their id, only which one it is counts.
    """
    pickler = _Fingerprint(apart)
    try:
        pickler.dump(value)
    except (_UnseenError, RecursionError):
        return object()
    return pickler.sum


class _UnseenError(Exception):
    """It may have changed without a trace."""


class _Fingerprint(pickle.Pickler):
    def __init__(self, apart: Mapping[int, object]) -> None:
        super().__init__(self, protocol=5, buffer_callback=self._take)
        self.sum = 0
        self._apart = apart
        self._functions: set[int] = set()

    def write(self, data: Any) -> int:
        """A part of the pickle."""
        self.sum = zlib.crc32(data, self.sum)
        return len(data)

    def _take(self, buffer: pickle.PickleBuffer) -> None:
        self.write(repr(_of_array(np.frombuffer(buffer.raw(), np.uint8))).encode())

    def persistent_id(self, value: Any) -> Any:
        """What stands for an object that is not pickled."""
        if type(value) in ATOMS:
            return None
        if id(value) in self._apart:
            return "apart", id(value)
        if isinstance(value, Tensor):
            return _of_tensor(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return _of_array(value)
        if isinstance(value, torch.Generator):
            return _of_tensor(value.get_state())
        if isinstance(value, FunctionType):
            return self._of_function(value)
        if isinstance(value, _ONLY_WHICH):
            return id(value)
        if type(value) in _CONTAINERS:
            return _of_plain(value) if len(value) > _LONG else None
        if is_engines(type(value)) and hasattr(value, "__dict__") and not isinstance(value, _LOOKED_INTO):
            return self._of_engine(value)
        return None

    def _of_function(self, value: FunctionType) -> Any:
        """Which one it is, and the variables that it encloses."""
        if id(value) in self._functions or is_engines(value):
            return id(value)
        self._functions.add(id(value))
        return id(value), [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY]

    @staticmethod
    def _of_engine(value: Any) -> Any:
        if isinstance(value, Iterator):
            raise _UnseenError
        try:
            return id(value), value.state_dict() if is_stateful(value) else None
        except Exception as error:
            raise _UnseenError from error

    def reducer_override(self, value: Any) -> Any:
        """How an object says that it is pickled; instead of one that cannot be, which one it is."""
        try:
            reduced = value.__reduce_ex__(5)
        except Exception as error:  # a lock, an open file, whatever the user's objects raise
            if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
                raise _UnseenError from error
            return int, (id(value),)
        return reduced if isinstance(reduced, tuple) else (int, (id(value),))


_EMPTY: Final = CellType()


def _of_plain(value: Any) -> int | None:
    """Of a container of Python's own data: fast, also for a million of numbers; None of any other."""
    try:
        return zlib.crc32(marshal.dumps(list(value) if isinstance(value, deque) else value, 2))
    except ValueError:
        return None


def _of_tensor(value: Tensor) -> Any:
    """Its bytes: what is written through `.data` or a NumPy view leaves its version as it was."""
    if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided or value.is_quantized:
        return id(value), None if value.is_inference() else value._version
    flat = value.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.nbytes > _READ and flat.device.type != "cpu":
        flat = flat[:: flat.nbytes // _READ + 1]
    data = flat.cpu().contiguous().view(torch.uint8).numpy()
    return tuple(value.shape), str(value.dtype), str(value.device), _of_array(data)


def _of_array(value: np.ndarray[Any, Any]) -> Any:
    """A checksum of an array's memory, or of pieces of it."""
    flat, digest = np.ascontiguousarray(value).reshape(-1).view(np.uint8), 0
    if flat.size <= _READ:
        return value.shape, str(value.dtype), zlib.crc32(flat.data)
    for start in range(0, flat.size, max(_PIECE, flat.size // _PIECES)):
        digest = zlib.crc32(flat[start : start + _PIECE].data, digest)
    return value.shape, str(value.dtype), digest
