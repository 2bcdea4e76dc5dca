"""Builds Lightning's FSDP strategies, which then also train on CPUs, clip by norm and save through a CheckpointIO.

Lightning refuses exactly its own class on a CPU, though torch's FSDP runs there.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import FSDPStrategy as FabricFSDPStrategy
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
from torchmetrics import Metric

from fairlead.errors import CheckpointError, ConfigError
from fairlead.interfaces import BuildContext
from fairlead_distributed import checkpoint_layers, fsdp_state
from fairlead_distributed.full_state import named_as, plain_state
from fairlead_distributed.fully_sharded import mixed_precision_of, wrap_fsdp
from fairlead_runs.checkpoint_io import ShardedLoads
from fairlead_strategies.fsdp import FSDPMixedPrecision, FSDPStrategyConfig
from fairlead_strategies.shared import load_classes

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

    Lightning leaves that out, and then the gradients of the rest are not averaged.
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


class FabricFSDP(FabricFSDPStrategy):
    """Fabric's FSDP on any device."""

    def __init__(self, mesh: tuple[int, ...], checkpointed: Classes, **kwargs: Any) -> None:
        super().__init__(device_mesh=mesh, **kwargs)  # type: ignore[arg-type]  # one dimension will do, too
        self._mesh = self._fsdp_kwargs.pop("device_mesh")
        self._checkpointed = checkpointed

    def setup_environment(self) -> None:
        """Connects the ranks, then makes the mesh of their devices."""
        super().setup_environment()
        self._fsdp_kwargs["device_mesh"] = init_device_mesh(self.root_device.type, self._mesh)

    def setup_module(self, module: Module) -> Module:
        """Wraps what the user has not: at least the rest of the module, as its root."""
        autocast_on(self.root_device, self.precision)
        return wrap_rest(module, self.root_device, self._checkpointed, wrapping_options(self, self._fsdp_kwargs))

    def module_sharded_context(self) -> AbstractContextManager[None]:
        """Inside, torch's `wrap(layer)` makes a unit of a layer."""
        context: AbstractContextManager[None] = enable_wrap(
            wrapper_cls=layer_wrapper(self.root_device), **wrapping_options(self, self._fsdp_kwargs)
        )
        return context

    def full_parameters(self, module: Module) -> dict[str, Tensor]:
        """All parameters of a module that was set up, by name, complete and on the CPU; a collective."""
        return fsdp_state.full_parameters(_root(module))

    def full_gradients(self, module: Module) -> dict[str, Tensor]:
        """Its gradients after a backward pass in the same way; without those of parameters that have none."""
        return fsdp_state.full_gradients(_root(module))

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """As Lightning does; full states on a CPU are gathered here, where its way ends in a segmentation fault."""
        modules = [part for part in state.values() if isinstance(part, Module) and _is_sharded(part)]
        if self._state_dict_type == "full" and self.root_device.type == "cpu" and len(modules) == 1:
            full: dict[str, Any] = {}
            with fsdp_state.full_state(modules[0], rank0_only=True):
                for key, part in state.items():
                    full[key] = _gathered(modules[0], part)
                    if filter is not None and key in filter:
                        full[key] = {name: value for name, value in full[key].items() if filter[key](name, value)}
            if self.is_global_zero:
                torch.save(full, path)
            return
        super().save_checkpoint(path, state, storage_options, filter)


def _gathered(module: Module, part: Any) -> Any:
    if isinstance(part, Optimizer):
        return FullyShardedDataParallel.optim_state_dict(module, part)
    return part.state_dict() if hasattr(part, "state_dict") else part


def _is_sharded(module: Module) -> bool:
    return any(isinstance(part, FullyShardedDataParallel) for part in module.modules())


def _root(module: Module) -> Module:
    """FSDP's own module in what Fabric gave to the loop."""
    return next(part for part in module.modules() if isinstance(part, FullyShardedDataParallel))


class FSDPStrategy(LightningFSDP):
    """The Trainer's FSDP on any device; its checkpoints go through the CheckpointIO, in full or each rank its part."""

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
        """Also lets the precision clip by the norm of the full model, for which Lightning's has no root module."""
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
        """All parameters by the names of the unsplit module, complete and on the CPU; on all ranks together."""
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
        """Full weights, and full states of the optimizers; shards are loaded where they are read."""
        if "state_dict" not in checkpoint:
            return
        with fsdp_state.full_state(self._root, rank0_only=False):
            self._root.load_state_dict(named_as(self._root, checkpoint["state_dict"]), strict=strict)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning hands over what it finds in a full checkpoint."""
        return True

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Full states of the optimizers, each rank takes its part."""
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
