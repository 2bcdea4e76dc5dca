"""States of a user's own objects as plain data and tensors, which can be loaded without running code from the file."""

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
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from fairlead_distributed.user_objects import (
    ATOMS,
    OF_A_MODULE,
    has_state,
    is_frozen,
    is_list,
    is_users_class,
    record_of,
)

_KIND: Final = "fairlead:kind"
_ARRAY: Final = "fairlead:array"
GENERATORS: Final = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
# Python's own values, which come back as the class with the arguments that it names for a copy.
_VALUES: Final[Mapping[str, Any]] = {
    kind.__name__: kind
    for kind in (
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
        *(decimal.Decimal, fractions.Fraction, bytearray, range, slice),
    )
}
_MAPPINGS: Final[Mapping[str, Any]] = {kind.__name__: kind for kind in (Counter, OrderedDict, defaultdict)}


def state_of(value: Any) -> Any:
    """What `set_state` takes: its own state, and what parts of a module keep in attributes beside it."""
    if not isinstance(value, nn.Module):
        return value.state_dict()
    return [value.state_dict(), {path: own for path, part in value.named_modules() if (own := beside_state(part))}]


def beside_state(module: nn.Module) -> dict[str, Any]:
    """The data that a module keeps in attributes: of a layer of torch's the numbers, such as a rate of dropout."""
    users, hidden = is_users_class(type(module)), module._non_persistent_buffers_set
    # A base such as Lightning's module keeps things for itself there.
    bases = any(not is_users_class(base) for base in type(module).__mro__ if base not in (nn.Module, object))
    own = {k: v for k, v in vars(module).items() if k not in OF_A_MODULE and not (bases and k.startswith("_"))}
    own |= {name: value for name, value in module._buffers.items() if name in hidden}
    kinds = (*ATOMS, Tensor, np.ndarray, dict, list, tuple, set, deque, *GENERATORS) if users else ATOMS
    return {name: one for name, one in own.items() if isinstance(one, kinds) or (users and record_of(one) is not None)}


def set_state(value: Any, state: Any) -> None:
    """Has an object take what `state_of` gave, in the form of `to_plain`."""
    if not isinstance(value, nn.Module):
        value.load_state_dict(from_plain(state))
        return
    weights, beside = state
    value.load_state_dict(from_plain(weights))
    parts = dict(value.named_modules())
    for path, own in (_items(beside) or {}).items():
        for name, one in (_items(own) or {}).items():
            now = getattr(parts[path], name, None)
            if (kept := put_back(now, one)) is not now:
                setattr(parts[path], name, kept)


def to_plain(value: Any, where: str = "state") -> Any:
    """The value as numbers, texts, tensors, lists, tuples and dicts; a TypeError names the place of anything else."""
    if type(value) in ATOMS:
        return value
    if isinstance(value, Tensor):
        if value.grad_fn is not None:
            raise TypeError(f"{where} is a tensor with the graph that computed it: detach it")
        value = value.detach()
        return value if value.device.type == "cpu" else {_KIND: "on", "state": [value.device.type, value]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcmMSU":
        # torch has no arithmetic on some unsigned types, but bytes are bytes.
        data = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.size else None
        return {_ARRAY: str(value.dtype), "shape": list(value.shape), "data": data}
    if isinstance(value, Mapping):
        name = type(value).__name__ if type(value) in _MAPPINGS.values() else "dict"
        items = {key: to_plain(item, f"{where}[{key!r}]") for key, item in value.items()}
        if name == "dict" and all(type(key) in ATOMS for key in items):
            return items
        pairs = [[to_plain(key, f"the key {key!r} of {where}"), item] for key, item in items.items()]
        makes = getattr(value, "default_factory", None)
        factory = [str(getattr(makes, part, None)) for part in ("__module__", "__qualname__")]
        return {_KIND: "mapping", "state": [name, factory, pairs]}
    if type(value) is tuple or is_list(value):
        parts = [to_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    if type(value) in _VALUES.values():
        arguments = to_plain(list(value.__reduce_ex__(4)[1]), where)
        return {_KIND: "value", "state": [type(value).__name__, arguments]}
    try:
        if has_state(value):
            return {_KIND: "stateful", "state": to_plain(state_of(value), f"the state of {where}")}
        for kind, (base, take, _) in _KINDS.items():
            if isinstance(value, base):
                return {_KIND: kind, "state": to_plain(take(value), where)}
        if (record := record_of(value)) is not None:
            state = {name: to_plain(one, f"{where}.{name}") for name, one in record.items()}
            return {_KIND: "record", "state": [type(value).__module__, type(value).__qualname__, state]}
    except RecursionError:
        raise TypeError(f"{where} holds itself") from None
    raise TypeError(f"{where} is a {type(value).__name__}, which is no plain data")


def from_plain(value: Any) -> Any:
    """What `to_plain` was given: mappings come back as dicts."""
    if isinstance(value, dict):
        if _ARRAY in value:
            data = value["data"].cpu().numpy().tobytes() if value["data"] is not None else b""
            return np.frombuffer(data, dtype=value[_ARRAY]).reshape(value["shape"]).copy()
        if _KIND in value:
            return _KINDS[value[_KIND]][2](from_plain(value["state"]))
        return {key: from_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(from_plain(item) for item in value)
    return value


@torch.no_grad()
def put_back(now: Any, value: Any) -> Any:
    """The value that `to_plain` was given, in the object that holds it now where that is of its kind.

    Others may hold the same list, tensor or generator, and find the value there.

    Raises:
        TypeError: The class or the object that it belongs to is not there.
    """
    if isinstance(value, dict) and value.get(_KIND) == "stateful" and has_state(now):
        set_state(now, value["state"])
        return now
    if isinstance(value, list) and is_list(now):
        now[:] = [put_back(old, item) for old, item in itertools.zip_longest(now[: len(value)], value)]
        return now
    if type(value) is tuple and type(now) is tuple and len(now) == len(value):
        found = tuple(map(put_back, now, value))
        return now if all(map(operator.is_, found, now)) else found
    kind = value.get(_KIND) if isinstance(value, dict) else None
    if kind == "deque" and isinstance(now, deque) and value["state"][1] == now.maxlen:
        parts = value["state"][0]
        there = [put_back(old, item) for old, item in itertools.zip_longest(list(now)[: len(parts)], parts)]
        now.clear()
        now.extend(there)
        return now
    if (
        kind == "record"
        and value["state"][:2] == [type(now).__module__, type(now).__qualname__]
        and not (is_frozen(now) or isinstance(now, tuple))
    ):
        for name, one in value["state"][2].items():
            object.__setattr__(now, name, put_back(getattr(now, name, None), one))
        return now
    items = _items(value)
    if items is not None and isinstance(now, dict):
        kept = {key: put_back(_there(now, key, item), item) for key, item in items.items()}
        now.clear()
        now.update(kept)
        return now
    if items is not None and isinstance(now, MutableMapping):
        _settle(now, items)
        return now
    made = from_plain(value)
    if isinstance(made, Tensor) and isinstance(now, Tensor) and (made.shape, made.dtype) == (now.shape, now.dtype):
        return now.copy_(made)
    if isinstance(made, np.ndarray) and isinstance(now, np.ndarray):
        if not now.flags.writeable or (made.shape, made.dtype) != (now.shape, now.dtype):
            return made
        now[...] = made
    elif isinstance(now, GENERATORS) and type(now) is type(made):
        _set_generator(now, made)
    elif isinstance(made, set) and isinstance(now, set):
        now.clear()
        now.update(made)
    else:
        return made
    return now


def _settle(now: MutableMapping[Any, Any], items: Mapping[Any, Any]) -> None:
    """Sets what has changed in a mapping of another kind than dict: it may know a fixed set of keys, or references."""
    for key in [key for key in now if key not in items]:
        del now[key]
    for key, item in items.items():
        old = now.get(key)
        kept = put_back(old, item)
        if key not in now or (kept is not old and not (type(kept) is type(old) and kept == old)):
            now[key] = kept


def _items(value: Any) -> dict[Any, Any] | None:
    """What a mapping holds in the form of `to_plain`; None of anything else."""
    if not isinstance(value, dict) or _ARRAY in value:
        return None
    if _KIND not in value:
        return value
    return {from_plain(key): item for key, item in value["state"][2]} if value[_KIND] == "mapping" else None


def _there(now: dict[Any, Any], key: Any, item: Any) -> Any:
    """What a mapping has under a key; of a mapping of mappings, what it makes of a key that is missing."""
    inner = isinstance(now, defaultdict) and now.default_factory is not None and _items(item) is not None
    return now[key] if inner else now.get(key)


def _mapping(state: Any) -> Any:
    name, factory, pairs = state
    items = dict(pairs)
    if name != "defaultdict":
        return _MAPPINGS.get(name, dict)(items)
    try:
        return defaultdict(_class(*factory), items)
    except TypeError:  # a function of the user's, which the mapping that is there has as well
        return defaultdict(None, items)


def _enum(state: Any) -> Any:
    kind = _class(*state[:2])
    if not issubclass(kind, enum.Enum):
        raise TypeError(f"{state[0]}.{state[1]} is no Enum here")
    return kind[state[2]]


def _stateful(state: Any) -> Any:
    raise TypeError("its owner no longer exists")


def _class(module: str, path: str) -> type:
    """A class that this process has; nothing is imported."""
    kind: Any = sys.modules.get(module)
    for name in path.split("."):
        kind = getattr(kind, name, None)
    if not isinstance(kind, type):
        raise TypeError(f"there is no class {module}.{path} here")
    return kind


def _set_generator(now: Any, made: Any) -> None:
    if isinstance(now, random.Random):
        now.setstate(made.getstate())
    elif isinstance(now, np.random.Generator):
        now.bit_generator.state = made.bit_generator.state
    else:  # torch's and NumPy's older one
        now.set_state(made.get_state())


def _record(state: Any) -> Any:
    """An object of a class that this process has; neither imports nor runs anything of it."""
    module, path, values = state
    kind = _class(module, path)
    if not (issubclass(kind, tuple) or dataclasses.is_dataclass(kind) or is_users_class(kind)):
        raise TypeError(f"{module}.{path} is no record here")
    if issubclass(kind, tuple):
        return tuple.__new__(kind, values.values())
    made = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _random(state: Any) -> random.Random:
    made = random.Random()
    made.setstate(state)
    return made


def _numpy(state: Any) -> np.random.Generator:
    bits = getattr(np.random, state["bit_generator"])()
    bits.state = state
    return np.random.Generator(bits)


def _numpy_legacy(state: Any) -> np.random.RandomState:
    made = np.random.RandomState()
    made.set_state(state)
    return made


def _torch(state: Any) -> torch.Generator:
    made = torch.Generator(state[0])
    made.set_state(state[1])
    return made


# By the name in a file: the class, what to save of an object, and how to make one of it.
_KINDS: Final[dict[str, tuple[Any, Any, Any]]] = {
    "on": ((), None, lambda state: state[1].to(state[0])),  # a tensor on a device
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "deque": (deque, lambda value: [list(value), value.maxlen], lambda state: deque(*state)),
    "mapping": ((), None, _mapping),
    "number": (np.generic, np.asarray, lambda array: array[()]),
    "enum": (enum.Enum, lambda value: [type(value).__module__, type(value).__qualname__, value.name], _enum),
    "value": ((), None, lambda state: _VALUES[state[0]](*state[1])),
    "stateful": ((), None, _stateful),
    "path": (Path, str, Path),
    "record": ((), None, _record),
    "random": (random.Random, random.Random.getstate, _random),
    "numpy": (np.random.Generator, lambda value: value.bit_generator.state, _numpy),
    "numpy legacy": (np.random.RandomState, lambda value: value.get_state(legacy=False), _numpy_legacy),
    "torch": (torch.Generator, lambda value: [value.device.type, value.get_state()], _torch),
}
