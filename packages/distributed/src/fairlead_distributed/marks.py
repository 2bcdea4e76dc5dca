"""What tells whether a value is another one later, also where it was changed in place."""

from __future__ import annotations

import inspect
import io
import marshal
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from fairlead_distributed.plain_data import GENERATORS, beside_state, to_plain
from fairlead_distributed.user_objects import ATOMS, OF_A_MODULE, has_state, is_list, record_of

_LOOKED_AT: Final = 1 << 30  # bytes of an array: of a larger one, which cannot be kept, only some of them
_OF_A_TENSOR: Final = 1 << 26  # bytes of a tensor: a larger one has its version, and some of its bytes
_PIECES, _PIECE = 1 << 12, 1 << 12
_ITEMS: Final = 1 << 20  # of a container of objects: of a longer one, only whether another has taken its place
_NUMBERS: Final = 1 << 24  # of a container of Python's own data, likewise
_DEPTH: Final = 8


def mark_of(value: Any, elsewhere: Mapping[int, object], seen: frozenset[int] = frozenset()) -> Any:
    """A mark that `is_same` compares; it holds on to objects, so that none takes another's place.

    `elsewhere` are objects that are not looked into; `seen` those that hold it: one may hold its holder.
    """
    if isinstance(value, ATOMS):
        return value
    if id(value) in seen or id(value) in elsewhere:
        return _Object(value, None)
    if isinstance(value, Tensor):
        return _of_tensor(value)
    seen |= {id(value)}
    if isinstance(value, nn.Module):
        own = [one for part in value.modules() for one in (*part._parameters.values(), *part._buffers.values())]
        beside = beside_state if has_state(value) else _data_of  # a metric keeps what it counts there
        own += [one for part in value.modules() for one in beside(part).values()]
        return _Object(value, [mark_of(one, elsewhere, seen) for one in own])
    if inspect.ismethod(value):
        return _Object(value.__func__, id(value.__self__))
    if isinstance(value, bytearray):
        return _Object(value, zlib.crc32(value))
    content = _content(value, elsewhere, seen)
    if content is not None:
        return type(value), content
    return _Object(value, object() if _moves(value) else None)  # one that nothing is equal to


def is_same(mark: Any, value: Any, elsewhere: Mapping[int, object]) -> bool:
    """Whether it is still the value that has this mark."""
    now = mark_of(value, elsewhere)
    return type(now) is type(mark) and bool(now == mark)


def _data_of(module: nn.Module) -> dict[str, Any]:
    kinds = (*ATOMS, Tensor, np.ndarray, dict, list, tuple, set, deque)
    return {name: value for name, value in vars(module).items() if name not in OF_A_MODULE and isinstance(value, kinds)}


class _Object:
    """The same object, in the same version."""

    def __init__(self, value: object, version: Any) -> None:
        self.value, self.version = value, version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self.value is other.value and bool(self.version == other.version)

    __hash__ = None  # type: ignore[assignment]


def _of_tensor(value: Tensor) -> Any:
    """Its bytes: what is written through `.data` or a NumPy view leaves its version as it was."""
    size = value.numel() * value.element_size()
    here = value.device.type == "cpu"
    if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided or value.is_quantized:
        return _Object(value, None if value.is_inference() else value._version)
    if size <= _OF_A_TENSOR:
        flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
        return tuple(value.shape), str(value.dtype), str(value.device), zlib.crc32(flat.numpy().data)
    some = _sampled(value.detach().numpy()) if here and value.dtype != torch.bfloat16 else None
    return _Object(value, (None if value.is_inference() else value._version, some))


def _of_array(value: np.ndarray[Any, Any]) -> Any:
    if value.nbytes <= _LOOKED_AT:
        return (
            value.shape,
            str(value.dtype),
            zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data),
        )
    return value.shape, str(value.dtype), id(value), _sampled(value)


def _sampled(value: np.ndarray[Any, Any]) -> int | None:
    """Of pieces that lie evenly in it."""
    if not value.flags.c_contiguous:
        return None
    flat = value.reshape(-1).view(np.uint8)
    digest = 0
    for start in range(0, flat.size, max(_PIECE, flat.size // _PIECES)):
        digest = zlib.crc32(flat[start : start + _PIECE].data, digest)
    return digest


def _content(value: Any, elsewhere: Mapping[int, object], seen: frozenset[int]) -> Any:
    """A digest of what it holds; None: it cannot be looked into, or would take long."""
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return [mark_of(one, elsewhere, seen) for one in value.reshape(-1)] if value.size <= _ITEMS else None
    if isinstance(value, np.ndarray):
        return _of_array(value) if value.flags.writeable else None
    if isinstance(value, GENERATORS):
        return zlib.crc32(_bytes(to_plain(value)))
    if isinstance(value, (list, tuple, set, frozenset, dict, deque)) and len(value) <= _NUMBERS:
        try:
            return zlib.crc32(marshal.dumps(list(value) if isinstance(value, deque) else value, 2))
        except ValueError:  # something in it is more than Python's own data
            if len(value) > _ITEMS:
                return None
            items = [one for item in value.items() for one in item] if isinstance(value, dict) else value
            return [mark_of(one, elsewhere, seen) for one in items]
    if is_list(value):
        return [mark_of(one, elsewhere, seen) for one in value]
    if isinstance(value, Mapping):  # of a class of its own
        return [mark_of(one, elsewhere, seen) for item in list(value.items()) for one in item]
    record = record_of(value) if len(seen) <= _DEPTH else None
    return None if record is None else [mark_of(one, elsewhere, seen) for item in record.items() for one in item]


def _moves(value: object) -> bool:
    """Whether it may have changed without a trace: an iterator that has gone on, an object with a state of its own."""
    if has_state(value):  # but for the order of the data, which is kept in another way
        ours = type(value).__module__.partition(".")[0] not in ("torchdata", "datasets")
        return ours and not isinstance(value, (DataLoader, Dataset, Sampler))
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def _bytes(plain: Any) -> bytes:
    if isinstance(plain, Tensor):
        return plain.numpy().tobytes()
    if isinstance(plain, (dict, list, tuple)):
        return b" ".join(map(_bytes, plain.values() if isinstance(plain, dict) else plain))
    return repr(plain).encode()
