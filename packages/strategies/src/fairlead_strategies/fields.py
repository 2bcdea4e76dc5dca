"""Field types that several strategies share. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from fairlead import StrategyConfigBase

__all__ = ["LIGHTNING", "ClassPath", "ClassPaths", "ProcessGroupConfig"]

LIGHTNING = ("torch>=2.13", "lightning>=2.6.6,<2.7")
"""The engines that every strategy needs."""


def _path(value: Any) -> Any:
    return f"{value.__module__}:{value.__qualname__}" if isinstance(value, type) else value


def _paths(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(map(str, map(_path, value))))  # a set has no order; a config must have one
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, dict)) else value


ClassPath = Annotated[
    str, BeforeValidator(_path), Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$", examples=["my.layers:Block"])
]
"""A class as text, `module:Class`; in Python the class itself is accepted too."""

ClassPaths = Annotated[tuple[ClassPath, ...], BeforeValidator(_paths)]
"""Classes as a list of `module:Class`; in Python a set of classes is accepted too."""


class ProcessGroupConfig(StrategyConfigBase):
    """What every strategy with a process group can set."""

    process_group_backend: str = "auto"
    """Backend of torch.distributed: `nccl`, `gloo`, ...; `auto` takes the one that fits the device (R57, R183)."""
    timeout: timedelta = Field(timedelta(minutes=30), strict=False, gt=timedelta(0))
    """How long a collective, the first rendezvous included, may take before it fails: `"00:30:00"` or a number of
    seconds (R58). The default is torch's for gloo."""
