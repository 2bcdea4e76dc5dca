"""Builds Lightning's FSDP strategies, which then also train on CPUs, clip by norm and save through a CheckpointIO.

Lightning refuses exactly its own class on a CPU, though torch's FSDP runs there.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import FSDPStrategy as LightningFSDP
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import enable_wrap, size_based_auto_wrap_policy
from torch.nn import Module
from torch.optim import Optimizer

from fairlead.errors import CheckpointError, ConfigError
from fairlead.interfaces import BuildContext
from fairlead_distributed import fsdp_state
from fairlead_distributed.full_state import named_as, plain_state
from fairlead_distributed.fully_sharded import mixed_precision_of
from fairlead_runs.checkpoint_io import ShardedLoads
from fairlead_strategies.fsdp import FSDPMixedPrecision, FSDPStrategyConfig
from fairlead_strategies.fsdp_fabric import FabricFSDP
from fairlead_strategies.fsdp_wrapping import (
    Classes,
    autocast_on,
    call_through,
    layer_wrapper,
    wrap_rest,
    wrapping_options,
)
from fairlead_strategies.shared import load_classes


class FSDPStrategy(LightningFSDP):
    """The Trainer's FSDP on any device; its checkpoints go through the CheckpointIO, whole or each rank its part."""

    def __init__(self, mesh: tuple[int, ...], checkpointed: Classes, **kwargs: Any) -> None:
        super().__init__(device_mesh=mesh, **kwargs)  # type: ignore[arg-type]  # one dimension will do, too
        self._mesh = self.kwargs.pop("device_mesh")  # Lightning would make one of CUDA devices
        self._checkpointed = checkpointed

    def setup_environment(self) -> None:
        """Connects the ranks, then makes the mesh of their devices."""
        super().setup_environment()
        self.kwargs["device_mesh"] = init_device_mesh(self.root_device.type, self._mesh)

    def _setup_model(self, model: Module) -> Module:
        with _named_where_mixed(model):
            root = wrap_rest(model, self.root_device, self._checkpointed, wrapping_options(self, self.kwargs))
        if root is not model:
            call_through(root, model)
        return root

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Inside, torch's `wrap(layer)` makes a unit of a layer: in the user's `configure_model`."""
        with enable_wrap(wrapper_cls=layer_wrapper(self.root_device), **wrapping_options(self, self.kwargs)):
            yield

    def setup(self, trainer: Any) -> None:
        """Also lets the precision clip by the norm of the whole model, for which Lightning's has no root module."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.lightning_module.automatic_optimization:
            raise ConfigError(
                "strategy: fsdp does not go together with manual optimization",
                where="trainer.strategy",
                why="FSDP1 has finished a backward pass when the step is over, in which manual optimization uses it",
                fix="strategy: fsdp2, or ddp",
            )
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and trainer.checkpoint_callbacks:
            _refuse_mixed_units(self._root)
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
        autocast_on(self.root_device, self.precision_plugin)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        root = self._root
        assert isinstance(root, FullyShardedDataParallel)
        root.clip_grad_norm_(clip_val)  # of all its parameters: automatic optimization has one optimizer

    def full_parameters(self) -> dict[str, Tensor]:
        """All parameters by the names of the unsplit module, whole and on the CPU; on all ranks together."""
        return fsdp_state.full_parameters(self._root)

    def full_gradients(self) -> dict[str, Tensor]:
        """The gradients after a backward pass in the same way; without those of parameters that have none."""
        return fsdp_state.full_gradients(self._root)

    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
        """What an optimizer holds for each parameter in the same way, by the parameters' names."""
        return fsdp_state.full_optimizer_state(self._root, optimizer)

    @property
    def _root(self) -> Module:
        assert self.model is not None
        return self.model

    def _state(self) -> AbstractContextManager[None]:
        if self._state_dict_type == "sharded":
            return fsdp_state.sharded_state(self._root)
        return fsdp_state.full_state(self._root, rank0_only=True)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights: this rank's part, or gathered on rank 0."""
        with self._state():
            state: dict[str, Any] = self._root.state_dict()
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state in the same way."""
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        with self._state():
            if self._state_dict_type == "sharded":
                return fsdp_state.named_optimizer_state(self._root, inner)
            return fsdp_state.numbered_optimizer_state(self._root, inner)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a file through the CheckpointIO, and a directory of shards so that each rank reads its part."""
        path = Path(self.broadcast(os.fspath(checkpoint_path)))
        io: Any = self.checkpoint_io
        if not path.is_dir():
            return Strategy.load_checkpoint(self, path, weights_only)
        if not isinstance(io, ShardedLoads):
            return {**super().load_checkpoint(path, weights_only), "optimizer_states": []}
        with fsdp_state.sharded_state(self._root):
            own = plain_state(self._root.state_dict())
            found = io.load_shards(path, fsdp_state.destinations(own, self.optimizers), weights_only)
            if found is None:
                return Strategy.load_checkpoint(self, path, weights_only)
            self._root.load_state_dict(named_as(self._root, found.pop("state_dict")), strict=self._strict)
            if self._fits and "optimizer_states" in found:
                self._load_optimizers(found["optimizer_states"])
        if "optimizer_states" in found:
            found["optimizer_states"] = []  # they are where they belong
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Whole weights, and whole states of the optimizers; shards are loaded where they are read."""
        if "state_dict" not in checkpoint:
            return
        with fsdp_state.full_state(self._root, rank0_only=False):
            self._root.load_state_dict(named_as(self._root, checkpoint["state_dict"]), strict=strict)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning hands over what it finds in a whole checkpoint."""
        return True

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Whole states of the optimizers, each rank takes its part."""
        if checkpoint["optimizer_states"]:
            with fsdp_state.full_state(self._root, rank0_only=False):
                self._load_optimizers(checkpoint["optimizer_states"])

    def _load_optimizers(self, states: Sequence[Mapping[str, Any]]) -> None:
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"the checkpoint has the state of {len(states)} optimizers, and the module has {len(self.optimizers)}",
                fix="use the module that it was written with, or start anew from its weights: --resume weights:PATH",
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            fsdp_state.load_optimizer_state(self._root, optimizer, state)

    @property
    def _strict(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.strict_loading

    @property
    def _fits(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.trainer.state.fn == TrainerFn.FITTING


_APART = "trainer.strategy.auto_wrap_policy with the classes of the layers, so that a unit is trained or frozen"


def _refuse_mixed_units(root: Module) -> None:
    """Torch aborts in the first checkpoint of such a unit."""
    for unit, frozen in fsdp_state.mixed_units(root).items():
        raise ConfigError(
            f"FSDP1 cannot save {unit or 'the model'}, which is partly frozen: {_some(frozen)}",
            where="trainer.strategy",
            why="it flattens frozen and trained parameters together, and a rank has none of the trained ones: torch "
            "cannot put the optimizer's state together",
            fix=f"strategy: fsdp2, or ddp; or {_APART}",
        )


@contextmanager
def _named_where_mixed(model: Module) -> Iterator[None]:
    frozen = [name for name, one in model.named_parameters() if not one.requires_grad]
    try:
        yield
    except ValueError as error:
        if "uniform `requires_grad`" not in str(error):
            raise
        raise ConfigError(
            f"use_orig_params: false cannot flatten frozen and trained parameters together: {_some(frozen)}",
            where="trainer.strategy.use_orig_params",
            fix=f"leave use_orig_params out; or {_APART}",
        ) from error


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def build(config: FSDPStrategyConfig, context: BuildContext) -> FSDPStrategy | FabricFSDP:
    """The strategy, with the classes of the policies imported."""
    resolution = context.resolution
    own = ("name", "activation_checkpointing_policy", "state_dict_type", "device_mesh")
    world, nodes = resolution.world_size, resolution.num_nodes
    hybrid = config.device_mesh or (nodes, world // nodes)
    sharded = resolution.checkpoint_io.saves_shards and context.engine == "trainer"
    kwargs: dict[str, Any] = {field: getattr(config, field) for field in type(config).model_fields if field not in own}
    kwargs |= {
        "process_group_backend": resolution.backend,
        "mixed_precision": _mixed_precision(config.mixed_precision),
        "auto_wrap_policy": _auto_wrap_policy(config),
        "backward_prefetch": BackwardPrefetch[config.backward_prefetch] if config.backward_prefetch else None,
        "state_dict_type": config.state_dict_type or ("sharded" if sharded else "full"),
    }
    mesh = hybrid if "HYBRID" in config.sharding_strategy else (world,)
    checkpointed_classes = load_classes(
        config.activation_checkpointing_policy or (), "trainer.strategy.activation_checkpointing_policy"
    )
    make = FSDPStrategy if context.engine == "trainer" else FabricFSDP
    return make(mesh, checkpointed_classes, **kwargs)


def _auto_wrap_policy(config: FSDPStrategyConfig) -> Any:
    policy = config.auto_wrap_policy
    if isinstance(policy, int):
        return functools.partial(size_based_auto_wrap_policy, min_num_params=policy)
    return None if policy is None else load_classes(policy, "trainer.strategy.auto_wrap_policy")


def _mixed_precision(requested: bool | FSDPMixedPrecision | None) -> MixedPrecision | None:
    if not isinstance(requested, FSDPMixedPrecision):
        return mixed_precision_of(requested)
    fields = requested.model_dump()
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        fields[name] = getattr(torch, fields[name]) if fields[name] else None
    return MixedPrecision(**fields)
