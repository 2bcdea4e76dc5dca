"""Builds Lightning's DDP strategies, both with communication hooks; the exact order of reduction is one too.

Lightning's Trainer registers hooks on CUDA only and silently drops them elsewhere; its Fabric strategy has none.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from fairlead.interfaces import BuildContext
from fairlead_distributed import register_exact_reduction
from fairlead_distributed.process_group import leave_at_exit
from fairlead_strategies.ddp import DDPStrategyConfig


class DDPStrategy(LightningDDPStrategy):
    """The Trainer's DDP, with communication hooks on every device."""

    def __init__(self, config: DDPStrategyConfig, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._config = config

    def setup_distributed(self) -> None:
        """Connects the ranks; those that Lightning spawns leave the group at exit, or gloo's threads may abort them."""
        super().setup_distributed()
        if self._start_method == "spawn":
            leave_at_exit()

    def configure_ddp(self) -> None:
        """Wraps the model, then registers the hook."""
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        register_hook(self._config, self.model)


class FabricDDP(FabricDDPStrategy):
    """Fabric's DDP, with communication hooks."""

    def __init__(self, config: DDPStrategyConfig, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._config = config

    def setup_module(self, module: Module) -> DistributedDataParallel:
        """Wraps the module, then registers the hook."""
        wrapped = super().setup_module(module)
        register_hook(self._config, wrapped)
        return wrapped


def register_hook(config: DDPStrategyConfig, model: DistributedDataParallel) -> None:
    """Registers the communication hook that the config names, or else the one that reduces in a fixed order."""
    if config.ddp_comm_hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif config.ddp_comm_hook == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif config.ddp_comm_hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=config.powersgd_rank,
            start_powerSGD_iter=config.powersgd_start_iter,
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif config.exact_reduction != "off":
        register_exact_reduction(model, auto=config.exact_reduction == "auto")


def build(config: DDPStrategyConfig, context: BuildContext) -> DDPStrategy | FabricDDP:
    """The strategy, with the resolved backend; the engine adds accelerator, precision and environment."""
    kwargs: dict[str, Any] = {
        "process_group_backend": context.resolution.backend,
        "timeout": config.timeout,
        "start_method": config.start_method,
        "find_unused_parameters": config.find_unused_parameters,
        # Torch makes the first bucket small, so that sending starts early, only when no size is given.
        "bucket_cap_mb": None if config.bucket_cap_mb == 25 else config.bucket_cap_mb,
        "gradient_as_bucket_view": config.gradient_as_bucket_view,
        "static_graph": config.static_graph,
    }
    names = ("broadcast_buffers", "init_sync")
    # Only what is requested: torch warns of a `broadcast_buffers` that is given, whatever it says.
    kwargs |= {
        name: value for name in names if (value := getattr(config, name)) != type(config).model_fields[name].default
    }
    return DDPStrategy(config, **kwargs) if context.engine == "trainer" else FabricDDP(config, **kwargs)
