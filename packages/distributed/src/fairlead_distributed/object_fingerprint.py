"""What tells whether an object is as it was before, also where it was changed in place, whatever it is made of."""

from __future__ import annotations

import io
import marshal
import pickle
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from fairlead_distributed.plain_data import ATOMS, is_engines

_READ: Final = 1 << 26  # bytes of a tensor or an array; of a larger one, pieces that lie evenly in it
_PIECES, _PIECE = 1 << 12, 1 << 12
_LONG, _ITEMS = 1 << 8, 1 << 20  # items of a container; of more objects than that only how many
_ONLY_WHICH: Final = (type, ModuleType, BuiltinFunctionType, DataLoader, Sampler)
_CONTAINERS: Final = (list, tuple, dict, set, frozenset, deque)


def fingerprint(value: Any, elsewhere: Mapping[int, object]) -> object:
    """Equal to that of an earlier moment of this process where the object is what it was then.

    `elsewhere` are objects that it may refer to, and that are not looked into.
    """
    if type(value) in _CONTAINERS and (found := _of_plain(value)) is not None:
        return found
    pickler = _Fingerprint(elsewhere)
    try:
        pickler.dump(value)
    except (_UnseenError, RecursionError):
        return object()  # equal to none
    return pickler.sum


def _of_plain(value: Any) -> int | None:
    """Of a container of Python's own data: fast, also for a million of numbers; None of any other."""
    try:
        return zlib.crc32(marshal.dumps(list(value) if isinstance(value, deque) else value, 2))
    except ValueError:
        return None


class _UnseenError(Exception):
    """It may have changed without a trace."""


class _Fingerprint(pickle.Pickler):
    """The checksum of a pickle; of functions, classes, engines' objects and open files: which of them it is."""

    def __init__(self, elsewhere: Mapping[int, object]) -> None:
        super().__init__(self, protocol=5, buffer_callback=self._take)
        self.sum = 0
        self._elsewhere = elsewhere
        self._functions: set[int] = set()

    def write(self, data: Any) -> int:
        """A part of the pickle."""
        self.sum = zlib.crc32(data, self.sum)
        return len(data)

    def _take(self, buffer: pickle.PickleBuffer) -> None:
        self.write(repr(_bytes(np.frombuffer(buffer.raw(), np.uint8))).encode())

    def persistent_id(self, value: Any) -> Any:
        """What stands for an object that is not pickled."""
        if type(value) in ATOMS:
            return None
        if id(value) in self._elsewhere:
            return "elsewhere"
        if isinstance(value, Tensor):
            return _of_tensor(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return value.shape, str(value.dtype), _bytes(value)
        if isinstance(value, torch.Generator):
            return _of_tensor(value.get_state())
        if isinstance(value, FunctionType):
            return self._of_function(value)
        if isinstance(value, Iterator) and is_engines(type(value)):
            raise _UnseenError
        holds = isinstance(value, (nn.Module, *_CONTAINERS))
        engines = is_engines(type(value)) and hasattr(value, "__dict__") and not holds
        if engines or isinstance(value, _ONLY_WHICH):
            return id(value)
        if type(value) not in _CONTAINERS or len(value) < _LONG:
            return None
        plain = _of_plain(value)
        return (id(value), len(value)) if plain is None and len(value) > _ITEMS else plain

    def _of_function(self, value: FunctionType) -> Any:
        if id(value) in self._functions or is_engines(value):
            return id(value)
        self._functions.add(id(value))
        cells = [vars(cell) if cell == _EMPTY else cell.cell_contents for cell in value.__closure__ or ()]
        return id(value), cells

    def reducer_override(self, value: Any) -> Any:
        """How an object says that it is pickled; instead of one that cannot be, which one it is."""
        try:
            reduced = value.__reduce_ex__(5)
        except Exception as error:  # a lock, an open file, whatever the user's objects raise
            if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
                raise _UnseenError from error
            return int, (id(value),)
        return reduced if isinstance(reduced, tuple) else (int, (id(value),))


_EMPTY: Final = type((lambda one: lambda: one)(0).__closure__[0])()  # type: ignore[index]


def _of_tensor(value: Tensor) -> Any:
    """Its bytes: what is written through `.data` or a NumPy view leaves its version as it was."""
    version = None if value.is_inference() else value._version
    if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided or value.is_quantized:
        return id(value), version
    size = value.numel() * value.element_size()
    if size > _READ and (value.device.type != "cpu" or not value.is_contiguous()):
        return id(value), version
    flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return tuple(value.shape), str(value.dtype), str(value.device), _bytes(flat.numpy())


def _bytes(value: np.ndarray[Any, Any]) -> int:
    """A checksum of an array's memory, or of pieces of it."""
    if value.nbytes <= _READ:
        return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    if not value.flags.c_contiguous:
        return id(value)
    flat, digest = value.reshape(-1).view(np.uint8), 0
    for start in range(0, flat.size, max(_PIECE, flat.size // _PIECES)):
        digest = zlib.crc32(flat[start : start + _PIECE].data, digest)
    return digest
