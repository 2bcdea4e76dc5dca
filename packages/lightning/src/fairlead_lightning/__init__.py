"""Fairlead's bridge to Lightning, imported when first used: listing its plugins imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fairlead_lightning.callback import Fairlead as Fairlead
    from fairlead_lightning.loop_fabric import fabric as fabric
    from fairlead_lightning.metrics.predictions import DistributedPredictionWriter as DistributedPredictionWriter
    from fairlead_lightning.trainer import Trainer as Trainer


__all__ = ["DistributedPredictionWriter", "Fairlead", "Trainer", "fabric"]

# No module here is called `fabric`: importing it would replace the function by the module.
_MODULES: Final = {
    "DistributedPredictionWriter": "metrics.predictions",
    "Fairlead": "callback",
    "Trainer": "trainer",
    "fabric": "loop_fabric",
}


def __getattr__(name: str) -> Any:
    """Imports a public name from the module that defines it (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fairlead_lightning' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fairlead_lightning.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
