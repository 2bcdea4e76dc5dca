"""What objects keep in attributes: plain data that have changed are saved and put back, anything else is named."""

from __future__ import annotations

import copy
import enum
import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from fairlead.findings import Inexact
from fairlead_distributed.object_fingerprint import fingerprint
from fairlead_distributed.plain_data import (
    ATOMS,
    GENERATORS,
    OF_A_MODULE,
    from_plain,
    is_engines,
    is_stateful,
    is_users_class,
    put_back,
    record_of,
    to_plain,
)

MOST_BYTES: Final = 1 << 30
"""The most that is saved of one attribute; a larger one is named among `Attributes.left`."""
_CONTAINERS: Final = (dict, list, tuple, set, frozenset, deque)
_DATA: Final = (Tensor, np.ndarray, np.generic, enum.Enum, *_CONTAINERS, *ATOMS, *GENERATORS)
_SAVED_ELSEWHERE: Final = (type, ModuleType, DataLoader, Sampler)

Path = tuple[str, ...]


@dataclass
class _Holder:
    value: object
    without: frozenset[str]
    only: frozenset[str] | None
    marks: dict[Path, Any] = field(default_factory=dict)
    marked: list[object] = field(default_factory=list)  # the objects: an id may be reused
    kinds: dict[Path, tuple[type, Any]] = field(default_factory=dict)  # of objects that take back what is theirs
    moved: set[Path] = field(default_factory=set)  # what was another value once: it may return to its first value


class Attributes:
    """The attributes of objects, watched from a beginning: numbers, texts, containers, tensors, arrays, generators.

    An object with a `state_dict` that an attribute holds is saved by that. Of an object of a class of the user's, a
    meter or a buffer, the attributes are saved as well, and nothing below. A class changes that by naming what is
    saved: `resume_attributes = ("seen",)`, or `()` for nothing.

    Attributes:
        left: What has changed and cannot be saved, by its name, with the reason.
        replaced: The names of which another object was watched before.
    """

    def __init__(self) -> None:
        self.left: dict[str, str] = {}
        self.replaced: set[str] = set()
        self._holders: dict[str, _Holder] = {}
        self._begun = False
        self._elsewhere: dict[int, object] = {}  # the objects too: an id may be reused
        self._watched: dict[int, object] = {}
        self._not_looked_into: dict[int, object] = {}
        self._saved: dict[str, Any] = {}

    def elsewhere(self, *objects: object) -> None:
        """Before any is watched: objects that are saved elsewhere, or not at all, whatever attribute has them."""
        self._elsewhere.update((id(one), one) for one in objects)
        self._not_looked_into = self._elsewhere

    def fingerprint(self, value: Any) -> object:
        """Equal to that of another moment where the value is what it was then."""
        return fingerprint(value, self._elsewhere)

    def watch(
        self,
        name: str,
        holder: object,
        without: frozenset[str] = frozenset(),
        only: frozenset[str] | None = None,
        *,
        always: bool = False,
    ) -> None:
        """Begins to watch an object, and puts back what `restore` has for it.

        One that is watched under this name already stays so, from its beginning; another one replaces it.
        `without` are names that are not saved; `only` those that are. `always`: what it holds is saved whether it
        changes or not, since another start makes it of what it has loaded.
        """
        known = self._holders.get(name)
        self._watched[id(holder)] = holder
        # One that was made to hold an object is as good as another for the same object.
        if known is None or not (known.value is holder or (type(holder) is SimpleNamespace and known.value == holder)):
            self.replaced |= {name} if known is not None else set()
            found = self._holders[name] = _Holder(holder, without, only)
            for path, value in self._leaves(found, beginning=True):
                if not always:
                    found.marks[path] = self._mark(value)
                    found.marked.append(value)
            self._watch_classes({type(holder), *(kind for kind, _ in found.kinds.values())} - {type})
        if name in self._saved:
            self._mark_anew()  # others may hold the same objects, and have not changed by this
            self._put_back(self._holders[name], name, self._saved.pop(name))

    def watch_module(self, name: str, module: nn.Module, without: frozenset[str] = OF_A_MODULE) -> None:
        """Begins to watch a module; of a class of torch's, as `nn.Dropout`, only numbers and texts."""
        # torch's fully_shard derives a class from the module's own.
        kind = next(one for one in type(module).__mro__ if not one.__module__.startswith("torch.distributed.fsdp"))
        if not is_engines(kind):
            self.watch(name, module, without)
        elif not kind.__module__.startswith("torchmetrics."):  # their sums are saved elsewhere
            numbers = (key for key, one in vars(module).items() if isinstance(one, ATOMS) and key not in OF_A_MODULE)
            self.watch(name, module, only=frozenset(numbers))

    def reasons(self) -> Iterator[Inexact]:
        """What has changed and cannot be saved."""
        for path, why in sorted(self.left.items()):
            yield Inexact(
                path,
                why=why,
                fix="keep plain data there, give its class state_dict and load_state_dict, "
                "or name what is to be saved in resume_attributes",
                certain=False,
            )

    def _watch_classes(self, kinds: set[type]) -> None:
        for kind in {base for one in kinds for base in one.__mro__}:
            if is_users_class(kind):
                self.watch(f"class {kind.__module__}.{kind.__qualname__}", kind)

    def begun(self) -> None:
        """The training begins: an object that is made from now on finds none to take its state in a resume."""
        self._begun = True
        self._mark_anew()

    def _mark_anew(self) -> None:
        """What is watched by now, the loaders' data sets too, is saved under its own name only."""
        same = {
            name: [path for path, value in self._leaves(holder, beginning=True) if not self._moved(holder, path, value)]
            for name, holder in self._holders.items()
        }
        self._not_looked_into = {**self._elsewhere, **self._watched}
        for name, holder in self._holders.items():
            values = dict(self._leaves(holder, beginning=True))
            holder.marks = {path: self._mark(values[path]) for path in same[name]}

    def state(self) -> dict[str, Any]:
        """What has changed since it is watched, by holder and path: plain data and tensors, not copied."""
        found: dict[str, Any] = {}
        for name, holder in self._holders.items():
            changed = []
            for path, value in self._leaves(holder):
                if not self._moved(holder, path, value):
                    continue
                path_name = ".".join((name, *path))
                try:
                    changed.append((path, self._serialized(holder, path, value)))
                    if path in holder.kinds and self._kind(value) != holder.kinds[path]:
                        self.left[path_name] = "attributes in it have changed, which are not in its state_dict"
                except TypeError as error:
                    self.left[path_name] = str(error)
                except Exception as error:  # of the user's `state_dict`
                    self.left[path_name] = f"it gives no state: {type(error).__name__}: {error}"
            if changed:
                found[name] = changed
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state` gave; what is of an object that is not watched yet, when it is."""
        for name, changed in state.items():
            if name in self._holders:
                self._put_back(self._holders[name], name, changed)
            else:
                self._saved[name] = changed

    def _put_back(self, holder: _Holder, name: str, changed: Any) -> None:
        for path, saved in ((tuple(path), saved) for path, saved in changed):
            holder.moved.add(path)
            try:
                owner: Any = holder.value
                for part in path[:-1]:
                    owner = _attributes(owner)[part]
                now: Any = _attributes(owner).get(path[-1])
                kind, plain = copy.deepcopy(saved)  # what holds it now may change it
                if kind == "state":
                    now.load_state_dict(from_plain(plain))
                elif (value := put_back(now, from_plain(plain))) is not now or value is None:
                    setattr(owner, path[-1], value)
            except KeyError:
                self.left[".".join((name, *path))] = "its owner no longer exists"
            except Exception as error:  # the user's code: a run that cannot have it back resumes, and says so
                self.left[".".join((name, *path))] = f"it could not be put back: {type(error).__name__}: {error}"

    def _leaves(self, holder: _Holder, *, beginning: bool = False) -> Iterator[tuple[Path, Any]]:
        """Each attribute of a holder, and of the objects that are gone into: these are there from the beginning."""
        seen: set[int] = set()
        for key, value in self._own(holder.value, holder.without, holder.only, seen):
            path = (key,)
            goes = self._is_gone_into(holder, value)
            if beginning and (goes or is_stateful(value)):
                holder.kinds[path] = self._kind(value)
            if not goes or holder.kinds.get(path) != self._kind(value):
                yield path, value
                continue
            for inner, one in self._own(value, frozenset(), None, seen):
                if beginning and is_stateful(one):
                    holder.kinds[*path, inner] = self._kind(one)
                yield (*path, inner), one

    def _own(
        self, owner: object, without: frozenset[str], only: frozenset[str] | None, seen: set[int]
    ) -> Iterator[tuple[str, Any]]:
        kind = owner if isinstance(owner, type) else type(owner)
        wanted = getattr(kind, "resume_attributes", None) if only is None else only
        for key, value in list(_attributes(owner).items()):
            if key in without or (wanted is not None and key not in wanted):
                continue
            if not isinstance(value, ATOMS):
                # Lightning takes `forward` away in a step, and puts it back so.
                of_class = inspect.ismethod(value) and value.__self__ is owner
                stream = is_stateful(value) and isinstance(value, Dataset)  # its position is its loader's
                known = any(id(value) in ids for ids in (self._elsewhere, self._watched, seen))
                if of_class or stream or known or isinstance(value, _SAVED_ELSEWHERE):
                    continue
                seen.add(id(value))
            yield key, value

    def _is_gone_into(self, holder: _Holder, value: object) -> bool:
        """Whether its attributes are watched: an object of the user's without a `state_dict`, or a wrapped data set."""
        if isinstance(value, (*_DATA, nn.Module)) or is_stateful(value) or record_of(value) is not None:
            return False
        kind = type(value)
        package = type(holder.value).__module__.partition(".")[0]
        users = is_users_class(kind) or (kind.__module__.partition(".")[0] == package and not is_engines(kind))
        return hasattr(value, "__dict__") and (users or isinstance(value, Dataset)) and not inspect.isroutine(value)

    def _moved(self, holder: _Holder, path: Path, value: Any) -> bool:
        """Whether it is another value now, or was so before."""
        if path not in holder.moved and path in holder.marks and self._mark(value) == holder.marks[path]:
            return False
        holder.moved.add(path)
        return True

    def _mark(self, value: Any) -> Any:
        """What is equal to that of an earlier moment where the value is what it was then."""
        if isinstance(value, ATOMS):
            return type(value), value
        if not is_stateful(value):
            return type(value), fingerprint(value, self._not_looked_into)
        try:
            return type(value), fingerprint(value.state_dict(), self._not_looked_into)
        except Exception:  # the user's: it may have none before the first step, and is read for each checkpoint
            return object()

    def _kind(self, value: object) -> tuple[type, Any]:
        """Its class; and of a module that no other has registered, what its `state_dict` does not have."""
        if not isinstance(value, nn.Module):
            return type(value), None
        beside = {path: _attributes(part, hidden=False) for path, part in value.named_modules()}
        return type(value), fingerprint(beside, self._not_looked_into)

    def _serialized(self, holder: _Holder, path: Path, value: Any) -> tuple[str, Any]:
        """As plain data.

        Raises:
            TypeError: It cannot be saved, with the reason.
        """
        if isinstance(holder.value, type):
            raise TypeError("its class holds it for all of its objects: keep it in an attribute of self")
        there = holder.kinds.get(path, (None, None))[0] is type(value)
        if self._begun and not there and (is_stateful(value) or self._is_gone_into(holder, value)):
            raise TypeError("it was made while training: make it before the training begins, as in __init__")
        stateful = is_stateful(value)
        plain = to_plain(value.state_dict() if stateful else value, "its state" if stateful else "it")
        size = _size(plain)
        if size > MOST_BYTES:
            raise TypeError(f"it has {size >> 20} MiB, and at most {MOST_BYTES >> 20} are saved")
        return "state" if stateful else "value", plain


def _attributes(owner: Any, *, hidden: bool = True) -> Mapping[str, Any]:
    """The names and values, with a module's buffers that are in no `state_dict`; `hidden`: those with an underscore."""
    if isinstance(owner, type):
        own = {name: value for name, value in vars(owner).items() if not name.startswith(("__", "_abc_"))}
        return {name: value for name, value in own.items() if isinstance(value, _DATA)}
    own = getattr(owner, "__dict__", {})
    if isinstance(owner, nn.Module):
        own = {name: value for name, value in own.items() if name not in OF_A_MODULE}
        own |= {name: owner._buffers[name] for name in owner._non_persistent_buffers_set}
    return own if hidden else {name: value for name, value in own.items() if not name.startswith("_")}


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (dict, list, tuple)):
        return sum(map(_size, value.values() if isinstance(value, dict) else value))
    return len(value) if isinstance(value, (str, bytes)) else 8
