"""A module that was given to `torch.compile`, as Lightning takes it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
from torch._dynamo import OptimizedModule


def uncompiled(thing: Any) -> Any:
    """What `torch.compile` was given, where that is a LightningModule, as after `module.compile()` with its options.

    Its `forward` is compiled. Lightning would compile `training_step` too, where torch cannot follow `self.log`.
    """
    if not isinstance(thing, OptimizedModule) or not isinstance(thing._orig_mod, L.LightningModule):
        return thing
    module: Any = thing._orig_mod
    context: Any = thing.dynamo_ctx
    module._compiled_call_impl = context(module._call_impl)
    return module
