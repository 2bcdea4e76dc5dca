"""Plain data of a user's: as what is loaded without running code from a file, and put back into what holds it."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import itertools
import operator
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

ATOMS: Final = (bool, int, float, complex, str, bytes, type(None))
GENERATORS: Final = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_LOADED_AS_THEY_ARE: Final = (*ATOMS, torch.Size, torch.dtype, torch.device)
Seen = dict[int, tuple[Any, Any]]
"""By the id of an object: it, so that no other has its id, and what was made of it."""
_KIND: Final = "fairlead:kind"
_ARRAY: Final = "fairlead:array"


def to_plain(value: Any, where: str = "state", *, devices: bool = True, seen: Seen | None = None) -> Any:
    """The value as numbers, texts, tensors, lists, tuples and dicts, for `from_plain`.

    Taken are lists, tuples, sets, mappings, deques, named tuples, dataclasses, members of an `Enum`, paths, dates,
    decimals, fractions, arrays and random generators of these. Tensors remember what kind of device they were on,
    unless `devices` is False. An object that is held twice is one in the result, and in a file of it, as well; `seen`
    has the objects of other values that may hold it.

    Raises:
        TypeError: It holds anything else, at the path that the message names.
    """
    kind = type(value)
    if kind in _LOADED_AS_THEY_ARE:
        return value
    seen = seen if seen is not None else {}
    if id(value) not in seen:
        seen[id(value)] = value, _to_plain(value, kind, where, devices, seen)
    return seen[id(value)][1]


def _to_plain(value: Any, kind: type, where: str, devices: bool, seen: Seen) -> Any:
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            raise TypeError(f"{where} is a tensor with the graph that computed it: detach it")
        here = value.device.type == "cpu" or not devices
        return value.detach() if here else {_KIND: "on", "state": [value.device.type, value.detach()]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcmMSU":
        # torch has no arithmetic on some unsigned types, but bytes are bytes.
        data = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.size else None
        return {_ARRAY: str(value.dtype), "shape": list(value.shape), "data": data}

    def plain(part: Any, at: str = "") -> Any:
        return to_plain(part, where + at, devices=devices, seen=seen)

    try:
        if kind in (list, tuple):
            parts = [plain(one, f"[{n}]") for n, one in enumerate(value)]
            return tuple(parts) if kind is tuple else parts
        if kind is dict and all(type(key) in ATOMS for key in value):
            return {key: plain(item, f"[{key!r}]") for key, item in value.items()}
        for name, (base, take, _) in _KINDS.items():
            if kind is base or (base in _WITH_SUBCLASSES and isinstance(value, base)):
                return {_KIND: name, "state": plain(take(value))}
        if isinstance(value, dict) and not getattr(value, "__dict__", {}):
            return {_KIND: "items", "state": plain(_pairs(value))}
        if (record := record_of(value)) is not None:
            state = {name: plain(one, f".{name}") for name, one in record.items()}
            return {_KIND: "record", "state": [kind.__module__, kind.__qualname__, state]}
    except RecursionError:
        raise TypeError(f"{where.partition('[')[0]} holds itself") from None
    raise TypeError(f"{where} is a {kind.__name__}, which is no plain data")


def from_plain(value: Any, seen: Seen | None = None) -> Any:
    """What `to_plain` was given; nothing is imported for it, and no code of the user's runs.

    `seen`: what was made already, of values that may share objects with this one.

    Raises:
        TypeError: This process has no class of that name.
    """
    if type(value) not in (dict, list, tuple):
        return value
    seen = seen if seen is not None else {}
    if id(value) not in seen:
        seen[id(value)] = value, _from_plain(value, seen)
    return seen[id(value)][1]


def _from_plain(value: Any, seen: Seen) -> Any:
    if not isinstance(value, dict):
        return type(value)(from_plain(item, seen) for item in value)
    if _ARRAY in value:
        data = value["data"].cpu().numpy().tobytes() if value["data"] is not None else b""
        return np.frombuffer(data, dtype=value[_ARRAY]).reshape(value["shape"]).copy()
    if _KIND in value:
        return _KINDS[value[_KIND]][2](from_plain(value["state"], seen))
    return {key: from_plain(item, seen) for key, item in value.items()}


def holds_generator(plain: Any) -> bool:
    """Whether there is a random generator in what `to_plain` returned."""
    if isinstance(plain, dict):
        return plain.get(_KIND) in _OF_GENERATORS or any(map(holds_generator, plain.values()))
    return isinstance(plain, (list, tuple)) and any(map(holds_generator, plain))


class Places:
    """The objects that restored values go into: what two attributes share, they share still.

    Those that are there are used, as others may hold them; each for one value, and each value goes into one.

    Args:
        taken: The ids of objects that no value goes into.
    """

    def __init__(self, taken: Iterable[int] = ()) -> None:
        self._of: dict[int, tuple[Any, Any]] = {}  # by a value: it, and its object
        self._taken = set(taken)
        self._filled: dict[int, Any] = {}

    def choose(self, now: Any, value: Any) -> Any:
        """The object for a value: `now` if it is of its kind, and free; else itself."""
        if id(value) not in self._of:
            free = id(now) not in self._taken and _fits(now, value)
            self._of[id(value)] = value, now if free else value
            self._taken.add(id(self._of[id(value)][1]))
        return self._of[id(value)][1]

    def is_filled(self, value: Any) -> bool:
        """Whether `put_back` has been there before."""
        before = id(value) in self._filled
        self._filled[id(value)] = value
        return before


@torch.no_grad()
def put_back(now: Any, value: Any, places: Places | None = None) -> Any:
    """The value, in the object that holds it now if that is of its kind: others may hold the same object.

    Raises:
        TypeError: It is of a mapping that cannot be made anew, and that is not there.
    """
    places = places if places is not None else Places()
    if type(value) in _LOADED_AS_THEY_ARE:
        return value
    if isinstance(value, tuple):
        old = now if type(now) is type(value) else ()
        found = [put_back(one, item, places) for one, item in zip(_padded(old, len(value)), value, strict=True)]
        same = len(old) == len(found) and all(map(operator.is_, found, old))
        return now if same else tuple.__new__(type(value), found)
    place = places.choose(now, value)
    if isinstance(value, _Items) and isinstance(place, _Items):
        raise TypeError("the mapping that held it no longer exists")
    if not places.is_filled(value):
        _fill(place, value, places)
    return place


def _fits(now: Any, value: Any) -> bool:
    """Whether an object can take the contents of a value."""
    if isinstance(value, _Items):
        return isinstance(now, dict)
    if isinstance(value, GENERATORS):
        return isinstance(now, type(value))
    if type(now) is not type(value):
        return False
    if isinstance(value, (Tensor, np.ndarray)):
        writeable = isinstance(now, Tensor) or now.flags.writeable
        return (value.shape, value.dtype) == (now.shape, now.dtype) and bool(writeable)
    if isinstance(value, deque):
        return bool(value.maxlen == now.maxlen)
    return isinstance(value, (list, dict, set)) or (dataclasses.is_dataclass(value) and not is_frozen(value))


def is_mutable(value: Any) -> bool:
    """Whether an object of plain data can take other contents."""
    return _fits(value, value)


def held(value: Any) -> Iterator[Any]:
    """The objects in plain data that can take other contents, itself among them."""
    rest, done = [value], set()
    while rest:
        one = rest.pop()
        if id(one) in done:
            continue
        if type(one) is not tuple and is_mutable(one):
            done.add(id(one))
            yield one
        if isinstance(one, dict):
            parts: Iterable[Any] = dict.values(one)
        else:
            parts = one if type(one) in (list, tuple, deque) else (record_of(one) or {}).values()
        kinds = set(map(type, parts))
        while kinds == {tuple}:  # there may be a million of them
            parts = list(itertools.chain.from_iterable(parts))
            kinds = set(map(type, parts))
        if not kinds.issubset(ATOMS):
            rest.extend(part for part in parts if type(part) not in ATOMS)


def _fill(place: Any, value: Any, places: Places) -> None:
    """Gives an object the contents of a value, which may be itself: what these hold may have another place."""
    if isinstance(value, (list, deque)):
        there = [put_back(one, item, places) for one, item in zip(_padded(place, len(value)), value, strict=True)]
        place.clear()
        place.extend(there)
    elif isinstance(value, dict):
        items = {key: put_back(_there(place, key), item, places) for key, item in value.items()}
        place.clear()
        place.update(items)
    elif dataclasses.is_dataclass(value) and not is_frozen(value):
        for name, one in (record_of(value) or {}).items():
            object.__setattr__(place, name, put_back(getattr(place, name, None), one, places))
    elif place is value:
        return
    elif isinstance(value, set):
        place.clear()
        place.update(value)
    elif isinstance(value, Tensor):
        place.copy_(value)
    elif isinstance(value, np.ndarray):
        place[...] = value
    elif isinstance(value, GENERATORS):
        _with_state(place, _state_of(value))


def _padded(items: Iterable[Any], length: int) -> list[Any]:
    return list(itertools.islice(itertools.chain(items, itertools.repeat(None)), length))


def _there(now: dict[Any, Any], key: Any) -> Any:
    """What a mapping has under a key, or makes of one that is missing."""
    return now[key] if isinstance(now, defaultdict) and now.default_factory is not None else now.get(key)


def is_frozen(value: object) -> bool:
    """Whether an object is one of a frozen dataclass: another replaces it, and it never changes."""
    return bool(getattr(getattr(type(value), "__dataclass_params__", None), "frozen", False))


def record_of(value: object) -> dict[str, Any] | None:
    """What a named tuple or a dataclass holds, by name; None of anything else."""
    kind = type(value)
    if isinstance(value, tuple):
        fields = getattr(kind, "_fields", None)
        return None if fields is None else dict(zip(fields, value, strict=True))
    if not dataclasses.is_dataclass(kind):
        return None
    names = [field.name for field in dataclasses.fields(kind) if hasattr(value, field.name)]
    return {name: getattr(value, name) for name in names} | getattr(value, "__dict__", {})


class _Items(dict[Any, Any]):
    """What a dict of another class held, which only other code makes: Lightning's `AttributeDict`."""


def _pairs(value: Mapping[Any, Any]) -> list[list[Any]]:
    return [[key, item] for key, item in value.items()]


def _defaultdict(state: Any) -> Any:
    module, path, pairs = state
    try:
        return defaultdict(_class(module, path), dict(pairs))
    except TypeError:  # a function of the user's, which the mapping that is there has as well
        return defaultdict(None, dict(pairs))


def _factory(value: defaultdict[Any, Any]) -> list[str]:
    return [str(getattr(value.default_factory, part, None)) for part in ("__module__", "__qualname__")]


def _enum(state: Any) -> Any:
    kind = _class(*state[:2])
    if not issubclass(kind, enum.Enum):
        raise TypeError(f"{state[0]}.{state[1]} is no Enum here")
    return kind[state[2]]


def _record(state: Any) -> Any:
    module, path, values = state
    kind = _class(module, path)
    if issubclass(kind, tuple):
        return tuple.__new__(kind, values.values())
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{module}.{path} is no dataclass here")
    made: Any = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _class(module: str, path: str) -> type:
    """A class that this process has; nothing is imported."""
    kind: Any = sys.modules.get(module)
    for name in path.split("."):
        kind = getattr(kind, name, None)
    if not isinstance(kind, type):
        raise TypeError(f"there is no class {module}.{path} here")
    return kind


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def _with_state(generator: Any, state: Any) -> Any:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:  # torch's and NumPy's older one
        generator.set_state(state)
    return generator


def _numpy(state: Any) -> Any:
    return _with_state(np.random.Generator(getattr(np.random, state["bit_generator"])()), state)


def _by_arguments(kind: Any) -> tuple[Any, Any, Any]:
    """Python's own values: made anew with the arguments that they name for a copy."""
    return kind, lambda value: list(value.__reduce_ex__(4)[1]), lambda arguments: kind(*arguments)


# By the name in a file: the class, what to save of an object, and how to make one of it.
_KINDS: Final[dict[str, tuple[Any, Any, Any]]] = {
    "on": ((), None, lambda state: state[1].to(state[0])),  # a tensor on a device
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "deque": (deque, lambda value: [list(value), value.maxlen], lambda state: deque(*state)),
    "dict": (dict, _pairs, dict),  # with keys that are more than numbers and texts
    "OrderedDict": (OrderedDict, _pairs, OrderedDict),
    "Counter": (Counter, _pairs, lambda pairs: Counter(dict(pairs))),
    "defaultdict": (defaultdict, lambda value: [*_factory(value), _pairs(value)], _defaultdict),
    "items": ((), None, _Items),
    "number": (np.generic, np.asarray, lambda array: array[()]),
    "enum": (enum.Enum, lambda value: [type(value).__module__, type(value).__qualname__, value.name], _enum),
    "path": (Path, str, Path),
    "record": ((), None, _record),
    "random": (random.Random, _state_of, lambda state: _with_state(random.Random(), state)),
    "numpy": (np.random.Generator, _state_of, _numpy),
    "numpy legacy": (np.random.RandomState, _state_of, lambda state: _with_state(np.random.RandomState(), state)),
    "torch": (
        torch.Generator,
        lambda value: [value.device.type, value.get_state()],
        lambda state: _with_state(torch.Generator(state[0]), state[1]),
    ),
    **{
        kind.__name__: _by_arguments(kind)
        for kind in (
            *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
            *(decimal.Decimal, fractions.Fraction, bytearray, range, slice),
        )
    },
}
_OF_GENERATORS: Final = ("random", "numpy", "numpy legacy", "torch")
_WITH_SUBCLASSES: Final = (np.generic, enum.Enum, Path, *GENERATORS)


OF_A_MODULE: Final = frozenset(vars(nn.Module()))
"""The attributes that torch keeps for itself in a module."""
# What has to outlive a stop is in their own state.
_ENGINES: Final = frozenset(
    (
        *("torch", "torchdata", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric"),
        *("lightning_utilities", "deepspeed"),
    )
)


def is_engines(kind: type | FunctionType) -> bool:
    """Whether a class or function is torch's, Lightning's or ours."""
    top = kind.__module__.partition(".")[0]
    return top in _ENGINES or top.startswith("fairlead")


def is_users_class(kind: type) -> bool:
    """Whether a class is neither Python's own nor an engine's nor ours, and not of an installed library."""
    module = sys.modules.get(kind.__module__)
    file = str(getattr(module, "__file__", None) or "")
    own = kind.__module__ == "__main__" or kind.__module__.partition(".")[0] not in sys.stdlib_module_names
    return own and not is_engines(kind) and "site-packages" not in file and "dist-packages" not in file


def is_stateful(thing: object) -> bool:
    """Whether it can say and take back where it is."""
    if isinstance(thing, (type, Mapping)):  # whose attributes are items
        return False
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))
