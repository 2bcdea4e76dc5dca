"""Builds Lightning's ModelParallelStrategy, taught to shard a module that does not shard itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn import Module

from fairlead.errors import ConfigError
from fairlead.interfaces import BuildContext
from fairlead_strategies.fsdp2.config import FSDP2StrategyConfig
from fairlead_strategies.fsdp2.sharding import is_parallelised, shard
from fairlead_strategies.objects import backend, load_classes

__all__ = ["FSDP2Strategy", "FabricFSDP2", "build"]

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class FSDP2Strategy(ModelParallelStrategy):
    """The Trainer's ModelParallelStrategy with default sharding."""

    def __init__(self, config: FSDP2StrategyConfig, classes: set[type[Module]] | None, **kwargs: Any) -> None:
        super().__init__(
            data_parallel_size=config.data_parallel_size, tensor_parallel_size=config.tensor_parallel_size, **kwargs
        )
        self._config = config
        self._classes = classes

    def setup_environment(self) -> None:
        """Resolves `data_parallel_size: auto` to all ranks, where Lightning would take the number of nodes."""
        if self._data_parallel_size == "auto":
            self._data_parallel_size = self.world_size // self._config.tensor_parallel_size
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """Shards the module unless it did so itself, then lets Lightning go on.

        Raises:
            ConfigError: Tensor parallelism was asked for, but the module applies no plan; or there is a layer sync
                to apply to layers that are sharded already.
        """
        module = self.lightning_module
        assert module is not None
        assert self.model is not None
        if is_parallelised(self.model):
            if self._layer_sync is not None and trainer.training:
                raise ConfigError(
                    "layer_sync cannot be applied to a module that has sharded itself",
                    where="trainer.layer_sync",
                    why="layers must be converted before they are sharded",
                    fix="convert them in `configure_model`, or leave the sharding to `strategy: fsdp2`",
                )
            with _configured(module):
                super().setup(trainer)
            return
        if self._config.tensor_parallel_size > 1:
            raise no_plan(self._config)
        if self._layer_sync is not None and trainer.training:
            self.model = self._layer_sync.apply(self.model)
        shard(
            self.model,
            self.device_mesh["data_parallel"],
            self.root_device,
            classes=self._classes,
            reshard_after_forward=self._config.reshard_after_forward,
        )
        for step in STEPS:
            # Lightning calls the steps, not `forward`; they must gather the root's parameters as well.
            register_fsdp_forward_method(module, step)
        with _configured(module):
            super().setup(trainer)


class FabricFSDP2(FabricModelParallelStrategy):
    """Fabric's ModelParallelStrategy with default sharding."""

    def __init__(self, config: FSDP2StrategyConfig, classes: set[type[Module]] | None, **kwargs: Any) -> None:
        def parallelize(module: Module, mesh: DeviceMesh) -> Module:
            if not is_parallelised(module):
                if config.tensor_parallel_size > 1:
                    raise no_plan(config)
                shard(
                    module,
                    mesh["data_parallel"],
                    self.root_device,
                    classes=classes,
                    reshard_after_forward=config.reshard_after_forward,
                )
            return module

        super().__init__(
            parallelize,
            data_parallel_size=config.data_parallel_size,
            tensor_parallel_size=config.tensor_parallel_size,
            **kwargs,
        )

    def setup_environment(self) -> None:
        """Resolves `data_parallel_size: auto` to all ranks, where Lightning would take the number of nodes."""
        if self._data_parallel_size == "auto":
            assert isinstance(self._tensor_parallel_size, int)
            self._data_parallel_size = self.world_size // self._tensor_parallel_size
        super().setup_environment()


@contextlib.contextmanager
def _configured(module: pl.LightningModule) -> Iterator[None]:
    """Satisfies Lightning's demand for an overridden `configure_model`, which is over once the model is sharded."""
    if type(module).configure_model is not pl.LightningModule.configure_model:
        yield
        return
    module.configure_model = lambda: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.configure_model


def no_plan(config: FSDP2StrategyConfig) -> ConfigError:
    """The error for tensor parallelism without a plan: which layer to split how, only the model's author knows."""
    return ConfigError(
        "the module does not say how to split its layers",
        where="trainer.strategy.tensor_parallel_size",
        why=f"tensor_parallel_size={config.tensor_parallel_size}, but no parameter is parallelised",
        fix="apply `parallelize_module(self, self.device_mesh['tensor_parallel'], plan)` in its `configure_model`",
    )


def build(config: FSDP2StrategyConfig, context: BuildContext) -> FSDP2Strategy | FabricFSDP2:
    """The strategy, with the classes of the policy imported.

    Raises:
        ConfigError: A class that the policy names does not exist.
    """
    policy = config.auto_wrap_policy
    classes = None if policy == "auto" else load_classes(policy, "trainer.strategy.auto_wrap_policy")
    kwargs: dict[str, Any] = {
        "save_distributed_checkpoint": config.save_distributed_checkpoint,
        "process_group_backend": backend(config, context),
        "timeout": config.timeout,
    }
    kind = FSDP2Strategy if context.engine == "trainer" else FabricFSDP2
    return kind(config, classes, **kwargs)
