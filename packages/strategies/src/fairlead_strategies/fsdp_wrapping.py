"""How the Trainer's and Fabric's FSDP wrap a module, on any device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module
from torchmetrics import Metric

from fairlead_distributed import checkpoint_layers
from fairlead_distributed.fully_sharded import wrap_fsdp

Classes = set[type[Module]]
_ROOT = "_fairlead_fsdp_root"


def wrapping_options(strategy: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a strategy of Lightning's gives to FSDP, but for the device."""
    return {
        **kwargs,
        "cpu_offload": strategy.cpu_offload,
        "mixed_precision": strategy.mixed_precision_config,
        "sharding_strategy": strategy.sharding_strategy,
    }


def autocast_on(device: torch.device, precision: Any) -> None:
    """Lightning's precision computes under CUDA's autocast, whatever the device is."""
    if device.type != "cuda" and "mixed" in precision.precision:
        dtype = torch.bfloat16 if precision.precision == "bf16-mixed" else torch.float16
        precision.forward_context = functools.partial(torch.autocast, device.type, dtype=dtype)


def layer_wrapper(device: torch.device) -> Callable[..., FullyShardedDataParallel]:
    """What torch's `wrap(layer)` is to make of a layer."""

    def make(layer: Module, **options: Any) -> FullyShardedDataParallel:
        return wrap_fsdp(layer, device, **options)

    return make


def wrap_rest(model: Module, device: torch.device, checkpointed: Classes, options: dict[str, Any]) -> Module:
    """Wraps what the user's `configure_model` has not: at least the rest of the module, as its root.

    Lightning leaves that out, and then nobody averages the gradients of the rest.
    """
    if _ROOT in vars(model):  # it has been trained before, and its parameters are shards: a test after a fit
        root: Module = vars(model)[_ROOT][0]
        return root
    checkpoint_layers(model, checkpointed)
    if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
        options.pop("auto_wrap_policy", None)  # the user has chosen the units
    for part in model.modules():
        if isinstance(part, Metric):
            part.to(device)  # FSDP moves only what has parameters
    if isinstance(model, FullyShardedDataParallel):
        return model
    root = wrap_fsdp(model, device, **options)
    vars(model)[_ROOT] = [root]  # in a list: as an attribute it would be a module inside of itself
    return root


def call_through(root: Module, module: Module) -> None:
    """Has `module(x)` in a callback or at the end of a fit gather the parameters that only the root knows.

    Lightning goes through the root for the steps alone; elsewhere the module would find its own shards.
    """
    if vars(module).get("forward") is not None and getattr(module.forward, "_through", None) is root:
        return
    own, inside = module.forward, [False]

    def enter(*_: Any) -> None:
        inside[0] = True

    def leave(*_: Any) -> None:
        inside[0] = False

    root.register_forward_pre_hook(enter)
    root.register_forward_hook(leave, always_call=True)

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs) if inside[0] else root(*args, **kwargs)

    forward._through = root  # type: ignore[attr-defined]
    module.forward = forward
