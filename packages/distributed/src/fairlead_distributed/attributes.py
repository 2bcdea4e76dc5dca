"""What objects keep in their attributes: as plain data where it has changed, and put back into the same objects."""

from __future__ import annotations

import copy
import enum
import functools
import inspect
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any, Final

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from fairlead_distributed.marks import is_same, mark_of
from fairlead_distributed.plain_data import GENERATORS, put_back, to_plain
from fairlead_distributed.user_objects import (
    ATOMS,
    OF_A_MODULE,
    has_state,
    is_frozen,
    is_list,
    is_users_class,
    own_values,
)

MOST_BYTES: Final = 1 << 30
"""What is kept of one attribute; a larger one is named among `Attributes.left`."""
_DEPTH: Final = 8  # objects in objects: an environment of Gymnasium lies in four wrappers
_CONTAINERS: Final = (dict, list, tuple, set, frozenset, deque)
_DATA: Final = (Tensor, np.ndarray, np.generic, *_CONTAINERS, enum.Enum, *ATOMS, *GENERATORS)
_HOLDING: Final = (functools.partial, Dataset, Sampler)  # of Python and torch, and all that they do is to hold others

Path = tuple[str, ...]


class Attributes:
    """The attributes of objects, watched from a beginning: numbers, texts, containers, tensors, arrays, generators.

    Objects of a user's classes that an attribute holds are gone into, as are what functions have enclosed and what
    their classes hold; one with a `state_dict` is kept by that. A class says otherwise by naming what is to be kept:
    `resume_attributes = ("seen",)`, or `()` for nothing.

    Attributes:
        left: What has changed and cannot be kept, by its place, with the reason.
        replaced: The names of which another object was watched before.
    """

    def __init__(self) -> None:
        self.left: dict[str, str] = {}
        self.replaced: set[str] = set()
        self._holders: dict[str, tuple[object, frozenset[str], frozenset[str] | None]] = {}
        self._marks: dict[str, dict[Path, Any]] = {}
        self._moved: dict[str, set[Path]] = {}  # what was another value once: it may be the first one again
        self._kinds: dict[tuple[str, Path], type] = {}  # of the objects that were gone into
        self._stateful: dict[tuple[str, Path], int] | None = None
        self._elsewhere: dict[int, object] = {}  # the objects too: an id may be given again
        self._saved: dict[str, dict[Path, Any]] = {}

    @property
    def watched(self) -> bool:
        """Whether any object is."""
        return bool(self._holders)

    def elsewhere(self, *objects: object) -> None:
        """Objects that are kept in another way, or not at all, wherever an attribute holds them."""
        self._elsewhere.update((id(one), one) for one in objects)

    def watch(
        self, name: str, holder: object, without: frozenset[str] = frozenset(), only: frozenset[str] | None = None
    ) -> None:
        """Begins to watch an object, and puts back what `restore` has for it.

        One that is watched under this name already stays so, from its beginning; another one takes its place.
        `without` are names that are not kept; `only` those that are.
        """
        watched = self._holders.get(name)
        self.elsewhere(holder)
        if watched is None or watched[0] is not holder:
            self.replaced |= {name} if watched is not None else set()
            self._holders[name], self._moved[name] = (holder, without, only), set()
            self._kinds = {place: kind for place, kind in self._kinds.items() if place[0] != name}
            kinds: dict[Path, type] = {}
            leaves = self._leaves(name, kinds, beginning=True)
            self._marks[name] = {path: mark_of(value, self._elsewhere) for path, value in leaves}
            self._kinds |= {(name, path): kind for path, kind in kinds.items()}
            if not isinstance(holder, type):
                self._watch_classes({type(holder), *kinds.values()})
        if name in self._saved:
            self._put_back(name, self._saved.pop(name))

    def always(self, name: str) -> None:
        """The data that a watched object holds are saved whether they change or not: a start may make others."""
        self._moved[name].update(path for path, value in self._leaves(name, {}) if isinstance(value, _DATA))

    def _watch_classes(self, kinds: set[type]) -> None:
        """What classes of the user hold for all of their objects."""
        for kind in sorted({base for one in kinds for base in one.__mro__}, key=lambda kind: kind.__qualname__):
            if is_users_class(kind) and not _is_installed(kind) and id(kind) not in self._elsewhere:
                self.watch(f"class {kind.__module__}.{kind.__qualname__}", kind)

    def begun(self) -> None:
        """The training begins: an object with a state that is made from now on finds none to take it in a resume."""
        self._stateful = {}
        for name in self._holders:
            kinds: dict[Path, type] = {}
            for path, value in self._leaves(name, kinds, beginning=True):
                self._stateful[name, path] = _with_state(value)
            self._kinds |= {(name, path): kind for path, kind in kinds.items()}

    def state(self) -> dict[str, Any]:
        """What has changed since it is watched, by holder and path: plain data and tensors, not copied."""
        found: dict[str, Any] = {}
        for name in list(self._holders):
            changed, kinds = [], dict[Path, type]()
            marks, moved = self._marks[name], self._moved[name]
            for path, value in self._leaves(name, kinds):
                if path in marks and path not in moved and is_same(marks[path], value, self._elsewhere):
                    continue
                moved.add(path)
                try:
                    if self._stateful is not None and _with_state(value) > self._stateful.get((name, path), 0):
                        raise TypeError(_MADE)
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
                owner = _attributes(owner).get(part)
            if owner is None:
                self.left[".".join((name, *path))] = "its owner no longer exists"
                continue
            try:
                now = _attributes(owner).get(path[-1])
                kept = put_back(now, value)
                if kept is not now or now is None:
                    _set(owner, path[-1], kept)
            except Exception as error:  # the user's code: a run that cannot have it back resumes, and says so
                self.left[".".join((name, *path))] = f"it could not be put back: {type(error).__name__}: {error}"

    def _leaves(self, name: str, kinds: dict[Path, type], *, beginning: bool = False) -> Iterator[tuple[Path, Any]]:
        """Each attribute below a holder, the innermost that can be kept as a whole.

        `kinds` are given the classes of the objects that were gone into. Behind the `beginning`, an object that has
        taken another's place is a whole: there is none of its class to put its parts into.
        """
        holder, without, only = self._holders[name]

        def below(owner: object, path: Path, without: frozenset[str]) -> Iterator[tuple[Path, Any]]:
            wanted = only if not path and only is not None else getattr(type(owner), "resume_attributes", None)
            for key, value in list(_attributes(owner).items()):
                if key in without or (wanted is not None and key not in wanted) or _is_of_class(owner, key, value):
                    continue
                place = (*path, key)
                if not isinstance(value, ATOMS):
                    if id(value) in self._elsewhere or id(value) in seen or isinstance(value, (type, ModuleType)):
                        continue
                    seen.add(id(value))
                if len(path) < _DEPTH and _is_gone_into(value):
                    kinds[place] = type(value)
                    if beginning or self._kinds.get((name, place)) is type(value):
                        yield from below(value, place, frozenset())
                        if not inspect.isroutine(value):
                            continue  # of a function also which one it is
                yield place, value
                if isinstance(value, _CONTAINERS) and is_users_class(type(value)) and own_values(value):
                    yield from below(value, place, frozenset())

        seen: set[int] = set()
        yield from below(holder, (), without)


_MADE: Final = "it has a state, and was made while training: make it in __init__, setup or on_fit_start"


def _attributes(owner: Any) -> Mapping[str, Any]:
    if isinstance(owner, nn.Module):
        hidden: set[str] = owner._non_persistent_buffers_set
        own = {name: value for name, value in vars(owner).items() if name not in OF_A_MODULE}
        return {**own, **{name: value for name, value in owner._buffers.items() if name in hidden}}
    if isinstance(owner, type):
        return {k: v for k, v in vars(owner).items() if not k.startswith(("__", "_abc_")) and _is_data_of_class(v)}
    if isinstance(owner, functools.partial):
        return {"func": owner.func, "args": owner.args, "keywords": owner.keywords, **vars(owner)}
    if inspect.ismethod(owner):
        return {"__self__": owner.__self__}
    if isinstance(owner, FunctionType):
        return {name: cell.cell_contents for name, cell in _cells(owner).items() if cell != _EMPTY}
    return own_values(owner)


def _is_of_class(owner: object, name: str, value: object) -> bool:
    """Whether it is a method as the class has it: Lightning takes `forward` away in a step, and puts it back so."""
    return inspect.ismethod(value) and value.__self__ is owner and getattr(type(owner), name, None) is value.__func__


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, FunctionType):
        _cells(owner)[name].cell_contents = value
    else:
        setattr(owner, name, value)


def _cells(function: FunctionType) -> dict[str, Any]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


_EMPTY: Final = type((lambda one: lambda: one)(0).__closure__[0])()  # type: ignore[index]


def _is_installed(kind: type) -> bool:
    file = str(getattr(sys.modules.get(kind.__module__), "__file__", ""))
    return "site-packages" in file or "dist-packages" in file


def _is_data_of_class(value: object) -> bool:
    code = (type, ModuleType, property, functools.cached_property, staticmethod, classmethod, MemberDescriptorType)
    return not isinstance(value, code) and not inspect.isroutine(value) and not hasattr(value, "__get__")


def _is_gone_into(value: Any) -> bool:
    """An object of a class that is neither Python's own nor an engine's, or one that only holds others."""
    if inspect.ismethod(value):
        return not isinstance(value.__self__, type) and _is_gone_into(value.__self__)
    if isinstance(value, FunctionType):
        return bool(value.__closure__) and is_users_class(value)
    if isinstance(value, _DATA) or is_list(value) or isinstance(value, Mapping) or has_state(value) or is_frozen(value):
        return False
    if isinstance(value, _HOLDING):
        return True
    return is_users_class(type(value)) and (hasattr(value, "__dict__") or bool(own_values(value)))


def _with_state(value: object, depth: int = 3) -> int:
    """How many objects with a state of their own it is, or holds."""
    if isinstance(value, (list, tuple, dict, deque)) and depth and len(value) < 1 << 16:
        items = value.values() if isinstance(value, dict) else value
        return sum(_with_state(one, depth - 1) for one in items if not isinstance(one, (*ATOMS, Tensor, np.ndarray)))
    return int(isinstance(value, Mapping) or has_state(value))  # a mapping of another class takes what a dict holds


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
