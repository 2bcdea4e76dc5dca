"""What objects keep in their attributes: as plain data where it has changed, and put back into the same objects."""

from __future__ import annotations

import copy
import enum
import inspect
import io
import marshal
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Final

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from fairlead_distributed.plain_data import (
    GENERATORS,
    has_state,
    is_frozen,
    is_list,
    is_users_class,
    put_back,
    record_of,
    to_plain,
)

MOST_BYTES: Final = 1 << 30
"""What is kept of one attribute; a larger one is named among `Attributes.left`."""
_LOOKED_AT: Final = 1 << 26  # bytes of an array: of a larger one, only whether another has taken its place
_ITEMS: Final = 1 << 20  # of a container, likewise
_DEPTH: Final = 8  # objects in objects: an environment of Gymnasium lies in four wrappers
_ATOMS: Final = (bool, int, float, complex, str, bytes, type(None))
_DATA: Final = (
    *(Tensor, np.ndarray, np.generic, Mapping, list, tuple, set, frozenset, deque, enum.Enum, *_ATOMS, *GENERATORS),
)
_OF_A_MODULE: Final = frozenset(vars(nn.Module()))

Path = tuple[str, ...]


class Attributes:
    """The attributes of objects, watched from a beginning: numbers, texts, containers, tensors, arrays, generators.

    Objects of a user's classes that an attribute holds are gone into; one with a `state_dict` is kept by that. A class
    says otherwise by naming what is to be kept: `resume_attributes = ("seen",)`, or `()` for nothing.

    Attributes:
        left: What has changed and cannot be kept, by its place, with the reason.
        replaced: The names of which another object was watched before.
    """

    def __init__(self) -> None:
        self.left: dict[str, str] = {}
        self.replaced: set[str] = set()
        self._holders: dict[str, tuple[object, frozenset[str]]] = {}
        self._marks: dict[str, dict[Path, Any]] = {}
        self._moved: dict[str, set[Path]] = {}  # what was another value once: it may be the first one again
        self._elsewhere: dict[int, object] = {}  # the objects too: an id may be given again
        self._saved: dict[str, dict[Path, Any]] = {}

    @property
    def watched(self) -> bool:
        """Whether any object is."""
        return bool(self._holders)

    def elsewhere(self, *objects: object) -> None:
        """Objects that are kept in another way, or not at all, wherever an attribute holds them."""
        self._elsewhere.update((id(one), one) for one in objects)

    def watch(self, name: str, holder: object, without: frozenset[str] = frozenset()) -> None:
        """Begins to watch an object, and puts back what `restore` has for it; `without` are names that are not kept.

        One that is watched under this name already stays so, from its beginning; another one takes its place.
        """
        watched = self._holders.get(name)
        self.elsewhere(holder)
        if watched is None or watched[0] is not holder:
            self.replaced |= {name} if watched is not None else set()
            self._holders[name], self._moved[name] = (holder, without), set()
            self._marks[name] = {path: _mark(value, self._elsewhere) for path, value in self._leaves(name)}
        if name in self._saved:
            self._put_back(name, self._saved.pop(name))

    def state(self) -> dict[str, Any]:
        """What has changed since it is watched, by holder and path: plain data and tensors, not copied."""
        found: dict[str, Any] = {}
        for name, marks in self._marks.items():
            changed = []
            for path, value in self._leaves(name):
                moved = self._moved[name]
                if path in marks and path not in moved and _is_same(marks[path], value, self._elsewhere):
                    continue
                moved.add(path)
                try:
                    changed.append((path, _kept(value)))
                except TypeError as error:
                    self.left[".".join((name, *path))] = str(error)
                except Exception as error:  # of the user's `state_dict`
                    self.left[".".join((name, *path))] = f"it gives no state: {type(error).__name__}: {error}"
            if changed:
                found[name] = changed
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state` gave; what is of an object that is not watched yet, when it is."""
        for name, changed in state.items():
            values = {tuple(path): value for path, value in changed}
            if name in self._holders:
                self._put_back(name, values)
            else:
                self._saved[name] = values

    def swap(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """As `restore`; returns a copy of what was there, with which `restore` puts that back."""
        for name, changed in state.items():
            self._moved.get(name, set()).update(tuple(path) for path, _ in changed)
        before = copy.deepcopy(self.state())
        self.restore(state)
        return before

    def _put_back(self, name: str, values: Mapping[Path, Any]) -> None:
        self._moved[name].update(values)
        for path, value in values.items():
            owner: Any = self._holders[name][0]
            for part in path[:-1]:
                owner = getattr(owner, part, None)
            if owner is None:
                self.left[".".join((name, *path))] = "the object that held it before is not there now"
                continue
            try:
                now = getattr(owner, path[-1], None)
                kept = put_back(now, value)
                if kept is not now or now is None:
                    setattr(owner, path[-1], kept)
            except Exception as error:  # the user's code: a run that cannot have it back resumes, and says so
                self.left[".".join((name, *path))] = f"it could not be put back: {type(error).__name__}: {error}"

    def _leaves(self, name: str) -> Iterator[tuple[Path, Any]]:
        """Each attribute below a holder, the innermost that can be kept as a whole."""
        holder, without = self._holders[name]
        yield from self._below(holder, (), without, set())

    def _below(self, owner: object, path: Path, without: frozenset[str], seen: set[int]) -> Iterator[tuple[Path, Any]]:
        wanted = getattr(type(owner), "resume_attributes", None)
        for name, value in list(_attributes(owner).items()):
            if name in without or (wanted is not None and name not in wanted):
                continue
            if not isinstance(value, _ATOMS):
                if id(value) in self._elsewhere or id(value) in seen or _is_code(value):
                    continue
                seen.add(id(value))
            if len(path) < _DEPTH and _is_users(value):
                yield from self._below(value, (*path, name), frozenset(), seen)
            else:
                yield (*path, name), value


def _attributes(owner: object) -> Mapping[str, Any]:
    if not isinstance(owner, nn.Module):
        return vars(owner) if hasattr(owner, "__dict__") else {}
    hidden: set[str] = owner._non_persistent_buffers_set
    own = {name: value for name, value in vars(owner).items() if name not in _OF_A_MODULE}
    return {**own, **{name: value for name, value in owner._buffers.items() if name in hidden}}


def _is_code(value: object) -> bool:
    return isinstance(value, (type, ModuleType)) or inspect.isroutine(value)


def _is_users(value: object) -> bool:
    """Whether to go into it: an object of a class that is neither Python's own nor an engine's."""
    if (
        isinstance(value, _DATA)
        or is_list(value)
        or has_state(value)
        or is_frozen(value)
        or not hasattr(value, "__dict__")
    ):
        return False
    return is_users_class(type(value))


def _kept(value: Any) -> Any:
    """As plain data.

    Raises:
        TypeError: It cannot be kept, with the reason.
    """
    plain = to_plain(value, "it")
    size = _size(plain)
    if size > MOST_BYTES:
        raise TypeError(f"it has {size >> 20} MiB, and up to {MOST_BYTES >> 20} are kept")
    return plain


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (dict, list, tuple)):
        return sum(map(_size, value.values() if isinstance(value, dict) else value))
    return len(value) if isinstance(value, (str, bytes)) else 8


# -- what has changed


def _mark(value: Any, elsewhere: Mapping[int, object], seen: frozenset[int] = frozenset()) -> Any:
    """What tells whether it is another value later; it holds on to objects, so that none takes another's place.

    `seen` are the objects that hold it: one may hold its holder.
    """
    if isinstance(value, _ATOMS):
        return value
    if id(value) in seen or id(value) in elsewhere:
        return _Object(value, None)
    if isinstance(value, Tensor):
        return _Object(value, value._version)
    if isinstance(value, nn.Module):
        parts = [*value.parameters(), *value.buffers()]
        own = [one for module in value.modules() for name, one in vars(module).items() if name not in _OF_A_MODULE]
        return _Object(value, [_mark(one, elsewhere) for one in (*parts, *own) if isinstance(one, _DATA)])
    if isinstance(value, bytearray):
        return _Object(value, zlib.crc32(value))
    content = _content(value, elsewhere, seen | {id(value)})
    if content is not None:
        return type(value), content
    return _Object(value, object() if _moves(value) else None)  # one that nothing is equal to


def _moves(value: object) -> bool:
    """Whether it may have changed without a trace: an iterator that has gone on, an object with a state of its own."""
    if has_state(value):  # but for the order of the data, which is kept in another way
        ours = type(value).__module__.partition(".")[0] not in ("torchdata", "datasets")
        return ours and not isinstance(value, (DataLoader, Dataset, Sampler))
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


class _Object:
    """The same object, in the same version."""

    def __init__(self, value: object, version: Any) -> None:
        self.value, self.version = value, version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self.value is other.value and bool(self.version == other.version)

    __hash__ = None  # type: ignore[assignment]


def _is_same(mark: Any, value: Any, elsewhere: Mapping[int, object]) -> bool:
    now = _mark(value, elsewhere)
    return type(now) is type(mark) and bool(now == mark)


def _content(value: Any, elsewhere: Mapping[int, object], seen: frozenset[int]) -> Any:
    """A digest of what it holds; None: it cannot be looked into, or would take long."""
    if isinstance(value, np.ndarray) and value.nbytes <= _LOOKED_AT and not value.dtype.hasobject:
        return value.shape, str(value.dtype), zlib.crc32(value.tobytes())
    if isinstance(value, GENERATORS):
        return zlib.crc32(_bytes(to_plain(value)))
    if isinstance(value, (list, tuple, set, frozenset, dict, deque)) and len(value) <= _ITEMS:
        try:
            return zlib.crc32(marshal.dumps(list(value) if isinstance(value, deque) else value, 2))
        except ValueError:  # something in it is more than Python's own data
            items = [one for item in value.items() for one in item] if isinstance(value, dict) else value
            return [_mark(one, elsewhere, seen) for one in items]
    record = record_of(value) if len(seen) <= _DEPTH else None
    return None if record is None else [_mark(one, elsewhere, seen) for item in record.items() for one in item]


def _bytes(plain: Any) -> bytes:
    if isinstance(plain, Tensor):
        return plain.numpy().tobytes()
    if isinstance(plain, (dict, list, tuple)):
        return b" ".join(map(_bytes, plain.values() if isinstance(plain, dict) else plain))
    return repr(plain).encode()
