"""A module that was given to `torch.compile`, as Lightning takes it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
from lightning.pytorch.utilities.compile import from_compiled
from torch._dynamo import OptimizedModule


def uncompiled(thing: Any) -> Any:
    """What `torch.compile` was given, where that is a LightningModule: its steps and `forward` stay compiled."""
    if isinstance(thing, OptimizedModule) and isinstance(thing._orig_mod, L.LightningModule):
        return from_compiled(thing)
    return thing
