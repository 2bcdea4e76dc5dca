"""Builds Lightning's ModelParallelStrategy, which also shards a module that does not shard itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn import Module
from torch.optim import Optimizer

from fairlead.errors import ConfigError
from fairlead.interfaces import BuildContext
from fairlead_runs.checkpoint_io import ShardedLoads
from fairlead_strategies.fsdp2.plugin import FSDP2StrategyConfig
from fairlead_strategies.fsdp2.sharding import destinations, is_parallelised, shard
from fairlead_strategies.shared import load_classes

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class FSDP2Strategy(ModelParallelStrategy):
    """The Trainer's ModelParallelStrategy with default sharding.

    Its shards go through a CheckpointIO that `saves_shards`: the state is given as it is, on the device.
    """

    def __init__(
        self,
        config: FSDP2StrategyConfig,
        classes: set[type[Module]] | None,
        *,
        saves_shards: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._config = config
        self._classes = classes
        self._saves_shards = saves_shards

    def setup(self, trainer: pl.Trainer) -> None:
        """Shards the module unless it did so itself, then lets Lightning continue."""
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
        else:
            if self._layer_sync is not None and trainer.training:
                self.model = self._layer_sync.apply(self.model)
            _shard(self.model, self.device_mesh, self.root_device, self._config, self._classes)
            for step in STEPS:
                # Lightning calls the steps, not `forward`; they must gather the root's parameters as well.
                register_fsdp_forward_method(module, step)
        with _configured(module):
            super().setup(trainer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights: shards where they are, or as Lightning gathers them."""
        assert self.model is not None
        return get_model_state_dict(self.model) if self._saves_shards else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's own state with shards in it, or as Lightning gathers it."""
        if not self._saves_shards:
            return super().optimizer_state(optimizer)
        return (optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer).state_dict()

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a whole checkpoint as Lightning does, and shards through the CheckpointIO, each rank its part.

        Lightning would read shards with plain `pickle`, which runs whatever they say.
        """
        path = Path(self.broadcast(os.fspath(checkpoint_path)))
        io: Any = self.checkpoint_io
        assert self.model is not None
        assert self.lightning_module is not None
        found = None
        if path.is_dir() and isinstance(io, ShardedLoads):
            found = io.load_shards(path, destinations(self.model, self.optimizers), weights_only)
        if found is None:
            return super().load_checkpoint(path, weights_only)
        self.model.load_state_dict(found.pop("state_dict"), strict=self.lightning_module.strict_loading)
        states = found.pop("optimizer_states", [])
        for optimizer, state in zip(self.optimizers, states, strict=False):
            optimizer.load_state_dict(state)
        return found

    def teardown(self) -> None:
        """Also ends the CheckpointIO, which Lightning leaves out here: what it could not write would be lost."""
        try:
            self.checkpoint_io.teardown()
        finally:
            super().teardown()


class FabricFSDP2(FabricModelParallelStrategy):
    """Fabric's ModelParallelStrategy with default sharding."""

    def __init__(self, config: FSDP2StrategyConfig, classes: set[type[Module]] | None, **kwargs: Any) -> None:
        def parallelize(module: Module, mesh: DeviceMesh) -> Module:
            if not is_parallelised(module):
                _shard(module, mesh, self.root_device, config, classes)
            return module

        super().__init__(parallelize, **kwargs)


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


def _shard(
    module: Module,
    mesh: DeviceMesh,
    device: torch.device,
    config: FSDP2StrategyConfig,
    classes: set[type[Module]] | None,
) -> None:
    if config.tensor_parallel_size > 1:  # which layer to split how, only the model's author knows
        raise ConfigError(
            "the module does not say how to split its layers",
            where="trainer.strategy.tensor_parallel_size",
            why=f"tensor_parallel_size={config.tensor_parallel_size}, but no parameter is parallelised",
            fix="apply `parallelize_module(self, self.device_mesh['tensor_parallel'], plan)` in its `configure_model`",
        )
    shard(module, mesh["data_parallel"], device, classes, reshard_after_forward=config.reshard_after_forward)


def build(config: FSDP2StrategyConfig, context: BuildContext) -> FSDP2Strategy | FabricFSDP2:
    """The strategy, with the classes of the policy imported."""
    policy = config.auto_wrap_policy
    classes = None if policy == "auto" else load_classes(policy, "trainer.strategy.auto_wrap_policy")
    saves_shards = context.resolution.checkpoint_io.saves_shards
    tensor, data = config.tensor_parallel_size, config.data_parallel_size
    kwargs: dict[str, Any] = {
        # Lightning's own `auto` is the number of nodes.
        "data_parallel_size": context.resolution.world_size // tensor if data == "auto" else data,
        "tensor_parallel_size": tensor,
        "save_distributed_checkpoint": bool(config.save_distributed_checkpoint) or saves_shards,
        "process_group_backend": context.resolution.backend,
        "timeout": config.timeout,
    }
    if context.engine == "trainer":
        return FSDP2Strategy(config, classes, saves_shards=saves_shards, **kwargs)
    return FabricFSDP2(config, classes, **kwargs)
