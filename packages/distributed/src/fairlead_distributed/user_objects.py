"""What is known of a user's objects by their classes: whether to look into them, and what they hold."""

from __future__ import annotations

import dataclasses
import sys
from types import FunctionType
from typing import Any, Final

import numpy as np
from torch import Tensor, nn

ATOMS: Final = (bool, int, float, complex, str, bytes, type(None))
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


def is_users_class(kind: type | FunctionType) -> bool:
    """Whether a class or function is neither Python's own nor an engine's nor ours."""
    if kind.__module__ in ("__main__", "types", "torch.utils.data.dataset"):
        return True
    return kind.__module__.partition(".")[0] not in sys.stdlib_module_names and not is_engines(kind)


def has_state(value: object) -> bool:
    """Whether an object gives and takes its state itself, all of it: a metric's `state_dict` is empty as a rule."""
    if isinstance(value, type) or not callable(getattr(value, "state_dict", None)):
        return False
    parts = value.modules() if isinstance(value, nn.Module) else ()
    return callable(getattr(value, "load_state_dict", None)) and not any(
        base.__module__.startswith("torchmetrics.") for part in parts for base in type(part).__mro__
    )


def is_frozen(value: object) -> bool:
    """Whether an object is one of a frozen dataclass: another takes its place, and it never changes."""
    return bool(getattr(getattr(type(value), "__dataclass_params__", None), "frozen", False))


def slots_of(kind: type) -> list[str]:
    """The names of the values that a class with `__slots__` keeps outside of `__dict__`."""
    named = [(base, vars(base).get("__slots__", ())) for base in kind.__mro__]
    pairs = [(base, name) for base, names in named for name in ([names] if isinstance(names, str) else names)]
    hidden = ("__dict__", "__weakref__")
    return [
        f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
        for base, name in pairs
        if name not in hidden
    ]


def own_values(value: object) -> dict[str, Any]:
    """What an object keeps in `__dict__` and in slots."""
    slots = slots_of(type(value)) if not isinstance(value, (Tensor, np.ndarray)) else []
    in_slots = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return in_slots | getattr(value, "__dict__", {})


def record_of(value: object) -> dict[str, Any] | None:
    """What a named tuple, a dataclass or a simple object of a user's class holds, by name; None of anything else."""
    kind = type(value)
    if isinstance(value, tuple):
        fields = getattr(kind, "_fields", None)
        return None if fields is None else dict(zip(fields, value, strict=True))
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind) if hasattr(value, field.name)]
        return {name: getattr(value, name) for name in names} | getattr(value, "__dict__", {})
    plain = kind.__new__ is object.__new__ and kind.__reduce__ is object.__reduce__
    return own_values(value) if plain and is_users_class(kind) and not hasattr(kind, "state_dict") else None


def is_list(value: object) -> bool:
    """Whether it is a list, or as good as one: a user's own sequence may hold more than its items, OmegaConf's not."""
    return isinstance(value, list) or type(value).__module__ == "omegaconf.listconfig"
