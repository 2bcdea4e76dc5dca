"""What the user's code keeps in memory, as texts that are equal when the bits are."""

from __future__ import annotations

import enum
import hashlib
import inspect
import itertools
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from fairlead_distributed.plain_data import is_engines

_DEPTH: Final = 6
_ITEMS: Final = 256
_LONG: Final = 40
_HASHED: Final = 1 << 28
_VALUES: Final = 20_000
_OTHERS: Final = ("transformers", "accelerate", "datasets", "tqdm")
"""Libraries beside torch and Lightning whose objects keep nothing of the user's own."""
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), PurePath, torch.dtype, torch.device, np.generic)


@dataclass(frozen=True)
class Owner:
    """Who keeps values in attributes; `name` as in `callback Ema`, `prefix` is its path in the model.

    `known` are the attributes that are no state of the user's; without `shown` none is read, here or elsewhere.
    """

    value: Any
    name: str
    prefix: str = ""
    known: frozenset[str] = frozenset()
    shown: bool = True


def remembered(owners: Sequence[Owner], roots: Sequence[Path]) -> dict[str, str]:
    """Each value that the user's objects and modules keep, by its name.

    Values are shown where they are short, else by a digest; those that cannot be read are left out. Variables of
    modules and classes count that are in `roots`, the folders of the user's code.
    """
    reader = _Reader([owner.value for owner in owners])
    found: dict[str, str] = {}
    for owner in owners:
        if owner.shown:
            own = {name: value for name, value in vars(owner.value).items() if name not in owner.known}
            found.update(reader.named(own, owner.prefix, owner.name))
    for module in _modules(roots):
        found.update(reader.named(_variables(module), "", f"module {module.__name__}"))
    return found


def _modules(roots: Sequence[Path]) -> list[ModuleType]:
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or "site-packages" in file or name.startswith(("fairlead.", "fairlead_")):
            continue
        path = Path(file).absolute() if name == "__main__" else Path(file)  # torch has modules of relative files
        if any(path.is_relative_to(root) for root in roots):
            found.append(module)
    return sorted(found, key=lambda module: module.__name__)


def _variables(module: ModuleType) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in list(vars(module).items()):
        if name.startswith("__"):
            continue
        if inspect.isclass(value):
            if value.__module__ == module.__name__:
                held = {key: item for key, item in vars(value).items() if not key.startswith("_")}
                found.update((f"{name}.{key}", item) for key, item in held.items() if _is_data(item))
        elif _is_data(value):
            found[name] = value
    return found


def _is_data(value: Any) -> bool:
    kinds = (ModuleType, type, property, classmethod, staticmethod)
    return not isinstance(value, kinds) and not inspect.isroutine(value)


def is_a_librarys(kind: type) -> bool:
    """Whether a class is that of a library, whose objects keep nothing of the user's own."""
    return is_engines(kind) or kind.__module__.partition(".")[0] in _OTHERS


class _Reader:
    """Reads objects, each of them once; `owners` are read under their own names, wherever else they are held."""

    def __init__(self, owners: list[Any]) -> None:
        self._seen = {id(owner): owner for owner in owners}  # the objects too: an id may be reused
        self._owned = frozenset(self._seen)
        self._left = _VALUES

    def named(self, values: Mapping[str, Any], prefix: str, owner: str) -> Iterator[tuple[str, str]]:
        for name, value in values.items():
            for path, text in self._read(value, f"{prefix}{name}", _DEPTH):
                yield f"{path} of the {owner}", text

    def _read(self, value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
        text = _text(value)
        if text is not None:
            self._left -= 1
            yield path, text
            return
        if depth == 0 or self._left <= 0 or id(value) in self._seen:
            return
        if not isinstance(value, tuple):  # it makes no difference whether two names hold one tuple or two equal ones
            self._seen[id(value)] = value
        for end, item in self._parts(value):
            if end:
                yield from self._read(item, path + end, depth - 1)
            else:
                yield path, item

    def _parts(self, value: Any) -> Iterator[tuple[str, Any]]:
        """What an object holds, by the end of its name; a text about the object itself has none."""
        if isinstance(value, dict):
            yield "", f"{len(value)} items"
            for number, (key, item) in enumerate(itertools.islice(value.items(), _ITEMS)):
                yield f"[{_short(repr(key)) if isinstance(key, _PLAIN) else number}]", item
        elif isinstance(value, (list, tuple, deque)):
            if len(value) > _ITEMS and all(isinstance(item, _PLAIN) for item in value):
                yield "", _digest(f"{len(value)} items", repr(value).encode())
                return
            yield "", f"{len(value)} items"
            for number, item in enumerate(itertools.islice(value, _ITEMS)):
                yield f"[{number}]", item
        elif isinstance(value, (set, frozenset)):
            plain = sorted(repr(item) for item in value if isinstance(item, _PLAIN))
            yield "", _digest(f"a set of {len(value)} items", repr(plain).encode())
        elif isinstance(value, nn.Module):
            if any(id(part) in self._owned for part in value.modules()):
                return  # a wrapper around the model, whose weights are in the checkpoint
            for name, item in value.state_dict().items():
                yield f".{name}", item
        elif hasattr(value, "__dict__") and _is_data(value) and not is_a_librarys(type(value)):
            for name, item in list(vars(value).items()):
                yield f".{name}", item


def _text(value: Any) -> str | None:
    """The text of a single value; None for one that holds others."""
    if isinstance(value, torch.Tensor):
        return _of_tensor(value.detach())
    if isinstance(value, np.ndarray) and value.dtype != object:
        return _digest(
            f"an array {value.dtype} {list(value.shape)}", value.tobytes() if value.nbytes < _HASHED else b""
        )
    if isinstance(value, random.Random):
        return _digest("a generator", repr(value.getstate()).encode())
    if isinstance(value, np.random.Generator):
        return _digest("a generator", repr(value.bit_generator.state).encode())
    if isinstance(value, np.random.RandomState):
        return _digest("a generator", repr(value.get_state(legacy=False)).encode())
    if isinstance(value, torch.Generator):
        return _digest("a generator", value.get_state().numpy().tobytes())
    if isinstance(value, (*_PLAIN, enum.Enum)):
        text = repr(value)
        return text if len(text) <= _LONG else _digest(text[: _LONG - 3] + "...", text.encode())
    return None


def _of_tensor(value: torch.Tensor) -> str:
    what = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    try:
        if value.numel() == 1:
            return f"{value.item()!r} ({what})"
        if value.numel() * value.element_size() >= _HASHED:
            return what
        return _digest(what, value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    except (RuntimeError, TypeError, NotImplementedError):  # sparse, sharded, on the meta device
        return what


def _digest(what: str, content: bytes) -> str:
    return f"{what} #{hashlib.sha256(content).hexdigest()[:8]}"


def _short(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."
