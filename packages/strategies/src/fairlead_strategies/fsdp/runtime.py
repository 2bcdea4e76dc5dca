"""Builds Lightning's FSDP1 strategies.

They are not subclassed: Lightning recognises exactly its own class when it refuses FSDP on a CPU.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from lightning.fabric.strategies import FSDPStrategy as FabricFSDPStrategy
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from fairlead.interfaces import BuildContext
from fairlead_strategies.fsdp.config import FSDPMixedPrecision, FSDPStrategyConfig
from fairlead_strategies.objects import backend, load_classes

__all__ = ["build"]


def build(config: FSDPStrategyConfig, context: BuildContext) -> FSDPStrategy | FabricFSDPStrategy:
    """The strategy, with the classes of the policies imported.

    Raises:
        ConfigError: A class that a policy names does not exist.
    """
    kwargs: dict[str, Any] = {
        "process_group_backend": backend(config, context),
        "timeout": config.timeout,
        "sharding_strategy": config.sharding_strategy,
        "cpu_offload": config.cpu_offload,
        "mixed_precision": _mixed_precision(config.mixed_precision),
        "auto_wrap_policy": _auto_wrap_policy(config),
        "state_dict_type": config.state_dict_type,
        "device_mesh": config.device_mesh,
        "sync_module_states": config.sync_module_states,
        "limit_all_gathers": config.limit_all_gathers,
        "forward_prefetch": config.forward_prefetch,
        "backward_prefetch": BackwardPrefetch[config.backward_prefetch] if config.backward_prefetch else None,
        "use_orig_params": config.use_orig_params,
    }
    if config.activation_checkpointing_policy is not None:
        kwargs["activation_checkpointing_policy"] = load_classes(
            config.activation_checkpointing_policy, "trainer.strategy.activation_checkpointing_policy"
        )
    return FSDPStrategy(**kwargs) if context.engine == "trainer" else FabricFSDPStrategy(**kwargs)


def _auto_wrap_policy(config: FSDPStrategyConfig) -> Any:
    policy = config.auto_wrap_policy
    if policy is None:
        return None
    if isinstance(policy, int):
        return functools.partial(size_based_auto_wrap_policy, min_num_params=policy)
    return load_classes(policy, "trainer.strategy.auto_wrap_policy")


def _mixed_precision(asked: bool | FSDPMixedPrecision | None) -> MixedPrecision | None:
    if asked is None or asked is False:
        return None
    if isinstance(asked, FSDPMixedPrecision):
        fields = asked.model_dump()
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            fields[name] = getattr(torch, fields[name]) if fields[name] else None
        return MixedPrecision(**fields)
    half = torch.bfloat16
    return MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half)
