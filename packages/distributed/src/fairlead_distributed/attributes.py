"""What objects keep in attributes: plain data that have changed are saved and restored, anything else is named."""

from __future__ import annotations

import copy
import enum
import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from fairlead.findings import Inexact
from fairlead_distributed.module_state import is_metric
from fairlead_distributed.object_fingerprint import fingerprint
from fairlead_distributed.plain_data import (
    ATOMS,
    GENERATORS,
    OF_A_MODULE,
    Places,
    Seen,
    from_plain,
    held,
    holds_generator,
    is_engines,
    is_mutable,
    is_stateful,
    is_users_class,
    put_back,
    record_of,
    to_plain,
)

MOST_BYTES: Final = 1 << 30
"""The most that is saved of one attribute; a larger one is named among `Attributes.unsaved`."""
_OF_OTHER_RANKS: Final = "its random generator begins anew: another number of ranks has saved it"
_CONTAINERS: Final = (dict, list, tuple, set, frozenset, deque)
_DATA: Final = (Tensor, np.ndarray, np.generic, enum.Enum, *_CONTAINERS, *ATOMS, *GENERATORS)

Path = tuple[str, str]
"""An owner, by its path in the watched object, and one of its attributes."""
_Saved = tuple[Path, tuple[str, Any]]
Restores = Callable[[str, Any, Any], bool]
"""Whether a saved attribute is restored, by its name in messages, the value that it has, and the saved one."""


@dataclass
class _Watched:
    value: Any
    only: frozenset[str] | None
    internal: frozenset[str]
    always: bool
    owners: dict[str, object] = field(default_factory=dict)  # what kind of object each was at the beginning
    marks: dict[Path, object] = field(default_factory=dict)
    marked: dict[Path, object] = field(default_factory=dict)
    held: dict[Path, tuple[object, set[int]]] = field(default_factory=dict)
    changed: set[Path] = field(default_factory=set)  # at some time: it may have returned to its first value


class Attributes:
    """The attributes of watched objects, and of the user's own objects that these attributes hold; no deeper.

    Plain data that have changed since the beginning are saved (see `to_plain`); an object with `state_dict` and
    `load_state_dict` is saved by these. A class can name what is saved: `resume_attributes = ("seen",)`, or `()` for
    nothing. Anything else that has changed is named in `unsaved`.

    Args:
        internal: The names of an object's attributes that are no state of the user's.

    Attributes:
        unsaved: What has changed and cannot be saved or restored, by its name, with the reason.
        replaced: The names under which another object was watched before.
    """

    def __init__(self, internal: Callable[[object], frozenset[str]] = lambda _: frozenset()) -> None:
        self.unsaved: dict[str, str] = {}
        self.replaced: set[str] = set()
        self._internal = internal
        self._watched: dict[str, _Watched] = {}
        self._excluded: dict[int, object] = {}  # with the objects, as an id may be reused
        self._known: dict[int, object] = {}  # these, and what is watched under a name of its own
        self._apart: Mapping[int, object] = self._excluded  # what a fingerprint does not look into
        self._begun = False
        self._tied: set[int] = set()  # the ids of objects that several attributes hold, or held at the beginning
        self._saved: dict[str, Any] = {}

    def exclude(self, *objects: object) -> None:
        """Before any is watched: objects that are saved elsewhere, or not at all, whatever attribute has them."""
        self._excluded.update((id(one), one) for one in objects)
        self._known.update(self._excluded)

    def watch(
        self,
        name: str,
        value: object,
        only: frozenset[str] | None = None,
        *,
        always: bool = False,
        restores: Restores = lambda *_: True,
    ) -> None:
        """Watches an object, or a module with its parts, and restores what `restore` was given for it.

        An object that already has this name stays as it is; another one replaces it.

        Args:
            name: In the checkpoint, and in messages.
            value: The object.
            only: The names of its attributes that are saved; None: all.
            always: They are saved whether they change or not: another start makes them of what it has loaded.
            restores: Whether one is restored now.
        """
        known = self._watched.get(name)
        # A namespace that was made to hold an object is as good as another for the same object.
        if known is None or not (known.value is value or (type(value) is SimpleNamespace and known.value == value)):
            self.replaced |= {name} if known is not None else set()
            self._watched[name] = _Watched(value, only, self._internal(value), always)
            self._known[id(value)] = value
            self._note(self._watched[name])
        if name in self._saved:
            self.mark()  # others may hold the same objects, and do not change by this
            self._restore([name], restores)

    def values(self, name: str) -> dict[str, Any]:
        """The plain data that a watched object holds now, by their names in messages."""
        found = self._leaves(self._watched[name]) if name in self._watched else ()
        return {_join(name, *path): value for path, value in found if isinstance(value, _DATA)}

    def mark(self) -> None:
        """Notes that all objects are watched: none is part of another's value; and what has changed until now."""
        for one in self._watched.values():
            for path, value in self._leaves(one):
                self._has_changed(one, path, value)
        held = [owner for one in self._watched.values() for owner in self._owners(one).values()]
        for kind in {base for owner in held for base in type(owner).__mro__ if is_users_class(base)}:
            name = f"class {kind.__module__}.{kind.__qualname__}"
            self._watched.setdefault(name, _Watched(kind, None, frozenset(), always=False))
        self._apart = {**self._known, **{id(owner): owner for owner in held}}
        for one in self._watched.values():
            self._note(one)
        self._tied = _held_twice(value for one in self._watched.values() for value in one.marked.values())

    def _note(self, one: _Watched) -> None:
        if not (self._begun and one.owners):
            one.owners = {path: _kind(owner) for path, owner in self._owners(one).items()}
        leaves = dict(self._leaves(one))
        one.marks, one.marked = {path: self._mark(value) for path, value in leaves.items()}, leaves

    def begun(self) -> None:
        """The training begins: a resumed run makes no object that is made from now on."""
        self.mark()
        self._begun = True

    def fingerprint(self, value: Any) -> object:
        """Equal to that of an earlier moment if the value has not changed."""
        return fingerprint(value, self._excluded)

    def state(self) -> dict[str, Any]:
        """What has changed since the beginning, by watched object: paths with plain data and tensors, not copied."""
        found: dict[str, Any] = {}
        seen: Seen = {}
        unchanged: list[tuple[str, Path, Any]] = []
        self._tied |= _held_twice(value for one in self._watched.values() for _, value in self._leaves(one))
        for name, one in self._watched.items():
            made = set(self._made_while_training(one)) if self._begun else set()
            for owner in made:
                what = f"a {type(self._owners(one)[owner]).__name__} that training has made"
                self.unsaved[_join(name, owner)] = f"it is {what}: make it before the training begins, as in __init__"
            saved = []
            for path, value in self._leaves(one):
                if path[0] in made or _join(*path) in made:
                    continue
                if not self._has_changed(one, path, value):
                    unchanged += [] if isinstance(one.value, type) else [(name, path, value)]
                    continue
                with self._saving(_join(name, *path)):
                    saved.append((path, self._serialized(one, value, seen)))
            if saved:
                found[name] = saved
        for name, path, value in unchanged:
            if not (is_stateful(value) or seen.keys().isdisjoint(self._held(self._watched[name], path, value))):
                # Another attribute holds it now as well; it comes first, as it was here before.
                with self._saving(_join(name, *path)):
                    found.setdefault(name, []).insert(0, (path, self._serialized(self._watched[name], value, seen)))
        return found

    @contextmanager
    def _saving(self, where: str) -> Iterator[None]:
        """Names what cannot be saved."""
        try:
            yield
        except TypeError as error:
            self.unsaved[where] = str(error)
        except Exception as error:  # of the user's `state_dict`
            self.unsaved[where] = f"its state_dict fails: {type(error).__name__}: {error}"

    def restore(self, state: Mapping[str, Any], *, same_ranks: bool = True) -> None:
        """Restores what `state` returned; for an object that is not watched yet, when it is.

        Where another number of ranks has saved it, random generators stay as they are: all ranks would draw alike.
        """
        for name, saved in state.items():
            self._saved[name] = saved if same_ranks else list(self._without_generators(name, saved))
        self._restore(name for name in state if name in self._watched)

    def _without_generators(self, name: str, saved: Iterable[_Saved]) -> Iterator[_Saved]:
        for path, (kind, plain) in saved:
            if holds_generator(plain):
                self.unsaved[_join(name, *path)] = _OF_OTHER_RANKS
            else:
                yield path, (kind, plain)

    def reasons(self) -> Iterator[Inexact]:
        """What has changed and cannot be saved."""
        save = (
            "keep plain data there, give its class state_dict and load_state_dict, "
            "or name what is to be saved in resume_attributes"
        )
        for path, why in sorted(self.unsaved.items()):
            fix = "resume with as many ranks" if why is _OF_OTHER_RANKS else save
            yield Inexact(path, why=why, fix=fix, certain=False)

    def _serialized(self, one: _Watched, value: Any, seen: Seen) -> tuple[str, Any]:
        """As plain data, with whether that is the value or its state.

        Raises:
            TypeError: It cannot be saved, with the reason.
        """
        if isinstance(one.value, type):
            raise TypeError("its class holds it for all of its objects: keep it in an attribute of self")
        stateful = is_stateful(value)
        plain = to_plain(value.state_dict() if stateful else value, "its state" if stateful else "it", seen=seen)
        size = _size(plain)
        if size > MOST_BYTES:
            raise TypeError(f"it has {size >> 20} MiB, and at most {MOST_BYTES >> 20} are saved")
        return "state" if stateful else "value", plain

    def _restore(self, names: Iterable[str], restores: Restores = lambda *_: True) -> None:
        """Together, as they may share objects."""
        copied: dict[int, Any] = {}
        made: Seen = {}
        saved = {name: self._saved.pop(name) for name in list(names)}
        for name, attributes in saved.items():
            self._watched[name].changed.update(path for path, _ in attributes)
        places = Places(self._unchanged())
        found: list[tuple[str, Any, str, str, Any]] = []
        for name, attributes in saved.items():
            owners = self._owners(self._watched[name])
            for (path, attribute), (kind, plain) in attributes:
                where = _join(name, path, attribute)
                if path not in owners:
                    self.unsaved[where] = "cannot be restored: its owner no longer exists"
                    continue
                with self._restoring(where):
                    value = from_plain(copy.deepcopy(plain, copied), made)  # what holds it now may change it
                    now: Any = _attributes(owners[path]).get(attribute)
                    if not restores(where, now, value):
                        continue
                    if kind == "value":
                        places.choose(now, value)
                    found.append((where, owners[path], attribute, kind, value))
        for where, owner, attribute, kind, value in found:
            with self._restoring(where):
                now = _attributes(owner).get(attribute)
                if kind == "state":
                    now.load_state_dict(value)
                elif (there := put_back(now, value, places)) is not now or there is None:
                    setattr(owner, attribute, there)

    def _unchanged(self) -> Iterator[int]:
        """The ids of what keeps its contents: no other attribute's come into it."""
        for one in self._watched.values():
            for path, value in self._leaves(one):
                if path not in one.changed:
                    yield from self._held(one, path, value)

    @staticmethod
    def _held(one: _Watched, path: Path, value: Any) -> set[int]:
        """The ids of all that an attribute's value holds; it may be a list of a million, and stays what it is."""
        before, ids = one.held.get(path, (None, None))
        if ids is None or before is not value:
            ids = {id(part) for part in held(value)}
            one.held[path] = value, ids
        return ids

    @contextmanager
    def _restoring(self, where: str) -> Iterator[None]:
        """Names what cannot be restored."""
        try:
            yield
        except Exception as error:  # the user's code: a run that cannot have it back resumes, and says so
            self.unsaved[where] = f"cannot be restored: {type(error).__name__}: {error}"

    def _owners(self, one: _Watched) -> dict[str, Any]:
        """By path: the object, with its parts if it is a module, and the objects that their attributes hold."""
        found = _parts("", one.value)
        seen = set(map(id, found.values()))
        for path, owner in list(found.items()):
            for name, value in self._own(one, owner):
                if id(value) not in seen and (is_stateful(value) or _is_looked_into(value, owner)):
                    parts = _parts(_join(path, name), value)
                    found |= parts
                    seen.update(map(id, parts.values()))
        return found

    def _leaves(self, one: _Watched) -> Iterator[tuple[Path, Any]]:
        """The attributes that are saved as one value."""
        owners = self._owners(one)
        for path, owner in owners.items():
            for name, value in self._own(one, owner):
                if is_stateful(value) or owners.get(_join(path, name)) is not value:
                    yield (path, name), value

    def _own(self, one: _Watched, owner: Any) -> Iterator[tuple[str, Any]]:
        """The attributes of an owner that may be the user's state."""
        chosen = one.only if owner is one.value else None
        if chosen is None:
            chosen = getattr(owner if isinstance(owner, type) else type(owner), "resume_attributes", None)
        numbers = False
        if isinstance(owner, nn.Module) and is_engines(_class_of(owner)):
            if is_metric(owner) and id(owner) in self._excluded:
                return  # its sums are in `module_state`
            numbers = not is_metric(owner)  # of nn.Dropout its rate
        elif is_stateful(owner) and owner is not one.value and not isinstance(owner, nn.Module):
            return  # it has said what its state is
        internal = one.internal if owner is one.value else self._internal(owner)
        for name, value in _attributes(owner).items():
            if name in internal or (chosen is not None and name not in chosen):
                continue
            # Lightning takes `forward` away in a step, and puts it back as a bound method.
            bound = inspect.ismethod(value) and value.__self__ is owner
            loaders = isinstance(value, (DataLoader, Sampler)) or (is_stateful(value) and isinstance(value, Dataset))
            elsewhere = numbers or bound or loaders or id(value) in self._known
            if isinstance(value, ATOMS) or not elsewhere:
                yield name, value

    def _made_while_training(self, one: _Watched) -> Iterator[str]:
        """Owners that are not those of the beginning; of a module that was replaced not the parts as well."""
        owners = self._owners(one)
        last = None
        for path, owner in owners.items():
            if one.owners.get(path) != _kind(owner) and not (last is not None and path.startswith(last)):
                last = f"{path}."
                yield path

    def _has_changed(self, one: _Watched, path: Path, value: Any) -> bool:
        """Whether it is another value now, or was so before; or an equal one that is shared with others, or was."""
        before = one.marked.get(path)
        moved = value is not before and not {id(before), id(value)}.isdisjoint(self._tied)
        if one.always or moved or path not in one.marks or self._mark(value) != one.marks[path]:
            one.changed.add(path)
        return path in one.changed

    def _mark(self, value: Any) -> object:
        """Equal to that of an earlier moment if the value has not changed."""
        if isinstance(value, ATOMS):
            return type(value), value
        try:
            if is_stateful(value):
                return type(value), fingerprint(value.state_dict(), self._apart)
        except Exception:  # the user's: it may have none before the first step, and is read for each checkpoint
            return object()
        return type(value), id(value) if id(value) in self._apart else fingerprint(value, self._apart)


def _is_looked_into(value: object, owner: object) -> bool:
    """Whether the attributes of an attribute's value are watched: it is a dataset, or an object of the user's."""
    if isinstance(value, (*_DATA, type)) or record_of(value) is not None or inspect.isroutine(value):
        return False
    kind = type(value)
    package = type(owner).__module__.partition(".")[0]
    users = is_users_class(kind) or (kind.__module__.partition(".")[0] == package and not is_engines(kind))
    return hasattr(value, "__dict__") and (users or isinstance(value, Dataset))


def _attributes(owner: Any) -> dict[str, Any]:
    """By name; of a module with its buffers that are in no `state_dict`, of a class its data."""
    if isinstance(owner, type):
        own = {name: value for name, value in vars(owner).items() if not name.startswith(("__", "_abc_"))}
        return {name: value for name, value in own.items() if isinstance(value, _DATA)}
    own = dict(getattr(owner, "__dict__", {}))
    if isinstance(owner, nn.Module):
        own = {name: value for name, value in own.items() if name not in OF_A_MODULE}
        own |= {name: owner._buffers[name] for name in owner._non_persistent_buffers_set}
    return own


def _parts(path: str, value: object) -> dict[str, Any]:
    """A module's parts by path, or the object alone."""
    if not isinstance(value, nn.Module):
        return {path: value}
    return {_join(path, name): part for name, part in value.named_modules()}


def _join(*names: str) -> str:
    return ".".join(filter(None, names))


def _class_of(module: nn.Module) -> type:
    """Its class; torch's `fully_shard` derives another one from it."""
    return next(one for one in type(module).__mro__ if not one.__module__.startswith("torch.distributed.fsdp"))


def _kind(owner: object) -> object:
    """What each start makes alike: its class, and the names of a module's parameters."""
    if not isinstance(owner, nn.Module):
        return type(owner)
    # A lazy layer becomes another with its first batch, also in a resumed run; a pruned parameter has another name.
    names = frozenset(name.removesuffix("_orig") for name in owner._parameters)
    return getattr(owner, "cls_to_become", None) or type(owner), names


def _held_twice(values: Iterable[Any]) -> set[int]:
    """The ids of the objects among them that can take other contents, and are there more than once."""
    count = Counter(id(value) for value in values if is_mutable(value))
    return {key for key, times in count.items() if times > 1}


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (dict, list, tuple)):
        return sum(map(_size, value.values() if isinstance(value, dict) else value))
    return len(value) if isinstance(value, (str, bytes)) else 8
