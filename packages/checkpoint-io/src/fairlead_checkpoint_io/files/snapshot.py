"""A state as it is now, in host memory, in a form that gives the same bytes each time.

`pickle` refers back to an object that it has seen before, by identity, so two equal states give different bytes when
one holds a string twice and the other two equal strings, as before and after a resume.  So strings are made one object
per value, tuples one for each time they occur; lists, dicts and tensors that are shared stay so: that has a meaning.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import torch

from fairlead.errors import CheckpointError
from fairlead_checkpoint_io.files.host_buffers import Arena

_ATOMS = frozenset({type(None), bool, int, float, complex, torch.dtype, torch.device, torch.Size, torch.layout})
_STRINGS = frozenset({str, bytes})


class Snapshot(NamedTuple):
    """A copy, and whether there is anything in it besides tensors, plain data and plain containers."""

    state: dict[str, Any]
    foreign: bool


def on_host(state: dict[str, Any]) -> Snapshot:
    """For a save that ends before the loop goes on: what is on a device is copied, the rest is shared."""
    arena = Arena(pin=False)
    snapshot = _run(_Copier(arena, everything=False), state)
    arena.synchronize()
    return snapshot


def copied(state: dict[str, Any], arena: Arena) -> Snapshot:
    """For a save that goes on while the loop does; the bytes from GPUs are there after `arena.synchronize()`."""
    return _run(_Copier(arena, everything=True), state)


def _run(copier: _Copier, state: dict[str, Any]) -> Snapshot:
    copier.arena.begin()
    with torch.inference_mode(False), torch.no_grad():
        result = copier.copy(state)
    copier.arena.seal()
    return Snapshot(result, foreign=copier.foreign)


class _Copier:
    def __init__(self, arena: Arena, *, everything: bool) -> None:
        self.arena = arena
        self.foreign = False
        self._everything = everything
        self._strings: dict[tuple[type, str | bytes], str | bytes] = {}
        self._memo: dict[int, Any] = {}
        self._keep: list[Any] = []  # an id is only an identity while its object lives
        self._deep: dict[int, Any] = {}

    def copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind in _STRINGS:
            return self._strings.setdefault((kind, value), value)
        if kind is tuple:
            return tuple([self.copy(item) for item in value])
        if id(value) in self._memo:
            return self._memo[id(value)]
        if kind is list:
            items: list[Any] = self._remember(value, [])
            items.extend([self.copy(item) for item in value])
            return items
        if kind in (dict, OrderedDict, defaultdict):
            return self._mapping(value)
        if kind in (set, frozenset):
            return self._remember(value, kind(self.copy(item) for item in value))
        if isinstance(value, torch.Tensor):
            return self._remember(value, self._tensor(value))
        self.foreign = True
        return self._remember(value, self._other(value)) if self._everything else value

    def _remember(self, old: Any, new: Any) -> Any:
        self._keep.append(old)
        self._memo[id(old)] = new
        return new

    def _mapping(self, value: Any) -> Any:
        new: Any = defaultdict(value.default_factory) if isinstance(value, defaultdict) else type(value)()
        self._remember(value, new)
        for key, item in value.items():
            new[self.copy(key)] = self.copy(item)
        # A state_dict carries its modules' versions in the attribute `_metadata`.
        for name, attribute in getattr(value, "__dict__", {}).items():
            setattr(new, name, self.copy(attribute))
        return new

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        lazy = value.is_conj() or value.is_neg()  # a view that says "conjugated" or "negated": stored as its values
        source = value.detach().resolve_conj().resolve_neg().requires_grad_(value.requires_grad) if lazy else value
        if source.device.type == "meta" or (source.device.type == "cpu" and not self._everything):
            return source
        if _is_plain(source):
            new = self._strided(source)
        else:
            new = source.detach().clone() if source.device.type == "cpu" else source.detach().cpu()
        if isinstance(value, torch.nn.Parameter) and not isinstance(new, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=value.requires_grad)
        elif value.requires_grad:
            new.requires_grad_()
        for name, attribute in value.__dict__.items():
            setattr(new, name, self.copy(attribute))
        return new

    def _strided(self, value: torch.Tensor) -> torch.Tensor:
        """Copies the storage, not the view, so that views of one storage still are, and bytes are as without."""
        storage = value.untyped_storage()
        key = storage._cdata  # torch.save tells storages apart by the same number
        host = self._memo.get(-key)  # ids are positive: no clash
        if host is None:
            self._keep.append(storage)
            host = self._memo[-key] = self.arena.copy(storage)
        return torch.empty(0, dtype=value.dtype).set_(host, value.storage_offset(), value.size(), value.stride())

    def _other(self, value: Any) -> Any:
        try:
            return copy.deepcopy(value, self._deep)
        except Exception as error:  # an object's own __deepcopy__ or __reduce__ may raise anything
            raise CheckpointError(
                f"an object of {type(value).__module__}.{type(value).__qualname__} in the checkpoint cannot be copied",
                why=f"{type(error).__name__}: {error}",
                fix="keep it out of the state (state_dict, on_save_checkpoint), or use `checkpoint_io: torch`",
            ) from error


def _is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor is fully described by its storage, shape and strides."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.device.type in ("cpu", "cuda")
        and value.layout is torch.strided
        and not value.is_quantized
    )
