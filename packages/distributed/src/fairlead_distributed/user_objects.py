"""What is known of a user's objects by their classes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FunctionType
from typing import Final

from torch import nn

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
