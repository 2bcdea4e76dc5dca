"""The Trainer's strategy on a device mesh: Lightning's ModelParallelStrategy, which also splits a module itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import enable_wrap
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import Module
from torch.optim import Optimizer

from fairlead.errors import ConfigError
from fairlead_distributed import clip_grad_norm, no_sync
from fairlead_distributed.full_state import named_as, plain_name, plain_state
from fairlead_runs.checkpoint_io import ShardedLoads
from fairlead_strategies.layout import Layout
from fairlead_strategies.mesh.config import MeshStrategyConfig, TensorPlanConfig
from fairlead_strategies.mesh.device_mesh import RanksOnMesh, agree_on_random_numbers, lightnings_mesh, make_mesh
from fairlead_strategies.mesh.full_state import (
    cut_model,
    cut_optimizer,
    destinations,
    forget_absent,
    model_on_first_rank,
    optimizer_on_first_rank,
    tuples_preserved,
)
from fairlead_strategies.mesh.parallelize import (
    gather_for_steps,
    is_parallelised,
    parallelize,
    require_no_settings,
    shard_rest,
)


class MeshStrategy(RanksOnMesh, ModelParallelStrategy):
    """The Trainer's strategy for `fsdp`, `fsdp2`, `tensor_parallel` and `hybrid`.

    Its shards go through a CheckpointIO that `saves_shards`: the state is given as it is, on the device.
    """

    def __init__(
        self, config: MeshStrategyConfig, layout: Layout, *, saves_shards: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(data_parallel_size=layout.data_parallel, tensor_parallel_size=layout.tensor, **kwargs)
        self.name = config.name
        self.layout = layout
        self._config = config
        self._saves_shards = saves_shards
        self._split = False
        self._chosen: list[Module] = []

    def setup_environment(self) -> None:
        """Connects the ranks and makes the mesh; Lightning would make one of two dimensions."""
        self._setup_distributed()
        module = self.lightning_module
        assert module is not None
        self._device_mesh = make_mesh(self.layout, self.root_device)
        # Users can access the mesh in `configure_model`, with Lightning's names for its dimensions.
        own = is_overridden("configure_model", module)
        module._device_mesh = lightnings_mesh(self.layout, self.root_device) if own else self._device_mesh
        agree_on_random_numbers(self._device_mesh, self.root_device)  # before the user's code draws a split of the data

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Inside, in the user's `configure_model`, torch's `wrap(layer)` makes the layer a unit of the later split."""

        def choose(layer: Module, **options: Any) -> Module:
            if options:
                raise ConfigError(
                    f"wrap({type(layer).__name__}(...)) is given {', '.join(options)}, which would have no effect",
                    where=f"{type(self.lightning_module).__name__}.configure_model",
                    why="wrap only chooses which layers are gathered and freed as one",
                    fix="set it in trainer.strategy, for all layers; or apply torch's fully_shard to this one",
                )
            self._chosen.append(layer)
            return layer

        self._chosen.clear()  # those of an earlier fit
        with enable_wrap(wrapper_cls=choose):
            yield

    def setup(self, trainer: pl.Trainer) -> None:
        """Splits the module unless it did so itself, then lets Lightning continue."""
        module = self.lightning_module
        assert module is not None
        assert self.model is not None
        if is_parallelised(self.model):
            require_no_settings(self.model, self._config)
            if self._layer_sync is not None and trainer.training:
                raise ConfigError(
                    "layer_sync cannot be applied to a module that has sharded itself",
                    where="trainer.layer_sync",
                    why="layers must be converted before they are sharded",
                    fix=f"convert them in `configure_model`, or leave the sharding to `strategy: {self.name}`",
                )
            own: Any = module.device_mesh
            ranks = own["data_parallel"] if "data_parallel" in own.mesh_dim_names else None
            if ranks is not None and shard_rest(self.model, ranks, self.device_mesh, self.root_device):
                gather_for_steps(module)
        else:
            if self._layer_sync is not None and trainer.training:
                self.model = self._layer_sync.apply(self.model)
            self.split()
            self._split = True
            gather_for_steps(module)
        # Torch's own cannot add up the norms of parameters on different dimensions of a mesh.
        self.precision_plugin.clip_grad_by_norm = partial(_clip_by_norm, self.precision_plugin)  # type: ignore[method-assign]
        with _configured(module), self._converted():
            super().setup(trainer)
        agree_on_random_numbers(self.device_mesh, self.root_device)

    def split(self) -> None:
        """Splits `self.model` over the mesh, in place, and converts it to the precision at the right moment."""
        assert self.model is not None
        convert = self.precision_plugin.convert_module
        parallelize(self.model, self.device_mesh, self._config, self.root_device, convert, chosen=self._chosen)

    @contextlib.contextmanager
    def _converted(self) -> Iterator[None]:
        """Keeps Lightning from converting once more what is sharded by now."""
        if not self._split:
            yield
            return
        self.precision_plugin.convert_module = lambda module: module  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.precision_plugin.convert_module

    def model_to_device(self) -> None:
        """Moves what is not sharded: shards that are offloaded stay in CPU memory."""
        assert self.model is not None
        if not self._config.cpu_offload:
            super().model_to_device()
            return
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.root_device)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, in which a loss may be computed of logits that are split."""
        with self._loss():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `training_step`."""
        with self._loss():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `training_step`."""
        with self._loss():
            return super().test_step(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's, of such a loss."""
        with self._loss():
            return super().backward(*args, **kwargs)

    def _loss(self) -> contextlib.AbstractContextManager[None]:
        config = self._config
        parallel = isinstance(config, TensorPlanConfig) and config.loss_parallel and self.layout.tensor > 1
        return loss_parallel() if parallel else contextlib.nullcontext()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """For all batches of an optimizer step but the last: copies are reduced with that one only."""
        assert self.model is not None
        if self._config.accumulate_unsharded:
            with no_sync(self.model):
                yield
            return
        roots = [part for part in self.model.modules() if isinstance(part, FSDPModule)]
        for root in roots:
            root.set_requires_all_reduce(False, recurse=False)
        try:
            yield
        finally:
            for root in roots:
                root.set_requires_all_reduce(True, recurse=False)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights: shards where they are, or as Lightning gathers them."""
        assert self.model is not None
        if self._saves_shards:
            return plain_state(get_model_state_dict(self.model))
        if self._gathers:
            return model_on_first_rank(self.model, self.root_device)
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's own state with shards in it, or as Lightning gathers it."""
        assert self.model is not None
        plain: Any = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        forget_absent([plain])
        if self._gathers:
            return optimizer_on_first_rank(self.model, plain, self.root_device)
        return plain.state_dict() if self._saves_shards else super().optimizer_state(optimizer)

    @property
    def _gathers(self) -> bool:
        """Whether rank 0 gathers what Lightning cannot gather."""
        return self._beyond_lightning and not (self._saves_shards or self._save_distributed_checkpoint)

    @property
    def _beyond_lightning(self) -> bool:
        """Whether some ranks do not hold some parameters, or compiled parts have names that Lightning cannot match."""
        assert self.model is not None
        return self.layout.expert > 1 or any(plain_name(path) != path for path, _ in self.model.named_modules())

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a full checkpoint, or shards through the CheckpointIO, each rank its part.

        Lightning would read shards with plain `pickle`, which runs whatever they say.
        """
        path = Path(self.broadcast(os.fspath(checkpoint_path)))
        io: Any = self.checkpoint_io
        assert self.model is not None
        assert self.lightning_module is not None
        found = None
        if path.is_dir() and isinstance(io, ShardedLoads):
            own = plain_state(get_model_state_dict(self.model))
            found = io.load_shards(path, destinations(own, self.optimizers), weights_only)
        if found is None and path.is_dir():
            with tuples_preserved(self.optimizers):
                found = super().load_checkpoint(path, weights_only)
            forget_absent(self.optimizers)
            return found
        if found is None:
            found = self._load_full(path, weights_only)
        if "state_dict" in found:
            weights = named_as(self.model, found.pop("state_dict"))
            self.model.load_state_dict(weights, strict=self.lightning_module.strict_loading)
        for optimizer, state in zip(self.optimizers, found.pop("optimizer_states", []), strict=False):
            optimizer.load_state_dict(state)
        forget_absent(self.optimizers)
        return found

    def _load_full(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        """A full checkpoint, cut as this rank holds it; the weights may be loaded already.

        Not so the optimizers' states: Lightning takes their numbers for those of the model's parameters in their order,
        and where a single process had groups of parameters in another, moments would be exchanged.
        """
        assert self.model is not None
        found: dict[str, Any]
        if self._beyond_lightning:
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
            found["state_dict"] = cut_model(named_as(self.model, found["state_dict"]), self.model)
        else:
            optimizers, self.optimizers = self.optimizers, []
            try:
                found = super().load_checkpoint(path, weights_only)
            finally:
                self.optimizers = optimizers
        states = zip(self.optimizers, found.get("optimizer_states", []), strict=False)
        found["optimizer_states"] = [cut_optimizer(state, optimizer) for optimizer, state in states]
        return found

    def teardown(self) -> None:
        """Also ends the CheckpointIO, which Lightning leaves out here: what it could not write would be lost."""
        try:
            self.checkpoint_io.teardown()
        finally:
            super().teardown()


def _clip_by_norm(precision: Any, optimizer: Optimizer, clip_val: float) -> None:
    clip_grad_norm(list(precision.main_params(optimizer)), clip_val)


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
