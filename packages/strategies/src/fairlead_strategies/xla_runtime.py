"""The XLA strategies at run time: what Lightning's classes do not do is overridden here.

- *Several devices in one process*: Lightning starts a process or thread for each device, which torch-xla supports on
  TPUs only.  Here one process drives all devices of the machine by SPMD: tensors are annotated with how they are split
  over a mesh, and the compiler makes one program of it for all devices.
- *Random numbers*: `torch.manual_seed`, which `seed_everything` calls, does not seed XLA devices.
- *Several hosts*: Lightning's own `XLAStrategy`, one rank per chip, as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from lightning.fabric import strategies as fabric
from lightning.pytorch import strategies as trainer
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fairlead import BuildContext
from fairlead_distributed.rng import seed_xla
from fairlead_strategies.xla import XLAStrategyConfig

AXIS = "data"
"""The one axis of the mesh: batches are split along it, and fully sharded parameters too."""


def build(config: XLAStrategyConfig, context: BuildContext) -> Any:
    """The strategy of one process for all devices of this machine; over several hosts Lightning's own."""
    resolution = context.resolution
    if isinstance(context.environ, MutableMapping):  # at each compilation XLA warns of what it will drop one day
        context.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if resolution.world_size > 1:
        if context.engine == "trainer":
            return trainer.XLAStrategy(debug=config.debug, sync_module_states=config.sync_module_states)
        return fabric.XLAStrategy(sync_module_states=config.sync_module_states)
    sharding = None
    if resolution.devices_per_rank > 1:
        sharding = Sharding(full=config.sharding_strategy == "FULL_SHARD")
    indices = resolution.device_indices
    index = indices[0] if indices and sharding is None else 0
    if context.engine == "trainer":
        return OneProcessXLAStrategy(index, sharding, debug=config.debug)
    return FabricOneProcessXLAStrategy(index, sharding)


class Sharding:
    """How tensors are split over all devices of this process.

    Numbers do not depend on it: an annotation says where a part of a tensor lies and is computed, not what it is.

    Args:
        full: Split parameters, and with them gradients and optimizer state, as well; else each device has all of them.
    """

    def __init__(self, *, full: bool) -> None:
        import numpy as np
        from torch_xla import runtime
        from torch_xla.distributed import spmd

        runtime.use_spmd()
        self.devices = int(runtime.global_runtime_device_count())
        self.mesh = spmd.Mesh(np.arange(self.devices), (self.devices,), (AXIS,))
        self._full = full
        self._mark = spmd.mark_sharding
        self._batch = 0

    def batch(self, batch: Any) -> Any:
        """Splits each tensor of a batch along its first dimension; of one that does not divide, each device has all."""
        sizes = set()
        for tensor in _tensors(batch):
            if tensor.dim() and tensor.shape[0] % self.devices == 0:
                sizes.add(tensor.shape[0])
                self._along(tensor, 0)
        self._batch = sizes.pop() if len(sizes) == 1 else 0
        return batch

    def parameters(self, module: Module) -> None:
        """Splits each parameter along its longest dimension, and has layers compute on their part of the batch."""
        if not self._full:
            return
        for parameter in module.parameters():
            self._longest(parameter)
        for layer in module.modules():
            # Else the compiler may as well split the computation along the parameters, and gather activations.
            if any(True for _ in layer.parameters(recurse=False)):
                layer.register_forward_hook(self._output)

    def state(self, optimizer: Optimizer) -> None:
        """Splits restored optimizer state as its parameters are; that of a new optimizer follows by itself."""
        if not self._full:
            return
        for parameter, state in optimizer.state.items():
            for value in state.values() if isinstance(state, Mapping) else ():
                if isinstance(value, Tensor) and value.device.type == "xla" and value.shape == parameter.shape:
                    self._longest(value)

    def _output(self, layer: Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.dim() and output.shape[0] == self._batch:
            self._along(output, 0)

    def _longest(self, tensor: Tensor) -> None:
        if tensor.dim():
            self._along(tensor, max(range(tensor.dim()), key=lambda dimension: tensor.shape[dimension]))

    def _along(self, tensor: Tensor, dimension: int) -> None:
        spec = [None] * tensor.dim()
        self._mark(tensor, self.mesh, (*spec[:dimension], AXIS, *spec[dimension + 1 :]))


def _tensors(batch: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.device.type == "xla")


def _compute_pending() -> None:
    """Computes what has been recorded so far; the next random numbers are the same as without.

    Each `torch_xla.sync` continues to another random state, whether a number was drawn or not.
    """
    import torch_xla
    from torch_xla.core import xla_model

    state = xla_model.get_rng_state()
    torch_xla.sync()
    xla_model.set_rng_state(state)


class OneProcessXLAStrategy(trainer.SingleDeviceXLAStrategy):
    """One device, or by SPMD all devices of this machine, for the Trainer.

    What is computed together ends at the same points whether or not a checkpoint is saved in between, as a resumed run
    needs it: with each batch, and before the next one.
    """

    def __init__(self, index: int, sharding: Sharding | None, *, debug: bool) -> None:
        import torch_xla

        # Not by Lightning's constructor for XLA, which gets the device by a function that torch-xla is giving up.
        trainer.SingleDeviceStrategy.__init__(self, torch_xla.device(index))
        self.debug = debug
        self.sharding = sharding
        self.devices_per_rank = sharding.devices if sharding is not None else 1

    def setup_environment(self) -> None:
        """Seeds the device as `seed_everything` has seeded torch, which leaves XLA devices as they are."""
        super().setup_environment()
        seed_xla(torch.initial_seed())

    def _setup_model(self, model: Module) -> Module:
        if self.sharding is not None:
            self.sharding.parameters(model)
        return model

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves the batch and splits it over the devices."""
        batch = super().batch_to_device(batch, device, dataloader_idx)
        return batch if self.sharding is None else self.sharding.batch(batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """What callbacks have recorded since the last batch must not become one program with this one."""
        super().on_train_batch_start(batch, batch_idx)
        _compute_pending()

    def post_backward(self, closure_loss: Tensor) -> None:
        """Where no step of the optimizer ends the batch, this does: Lightning would record all batches until then."""
        super().post_backward(closure_loss)
        module = self.lightning_module
        if module is not None and (module.trainer.accumulate_grad_batches > 1 or not module.automatic_optimization):
            import torch_xla

            torch_xla.sync()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Ends a program with each batch, as `test_step` and `predict_step` do."""
        return _computed(super().validation_step(*args, **kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `validation_step`."""
        return _computed(super().test_step(*args, **kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `validation_step`."""
        return _computed(super().predict_step(*args, **kwargs))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores the state and splits it as the parameters are."""
        super().load_optimizer_state_dict(checkpoint)
        if self.sharding is not None:
            for optimizer in self.optimizers:
                self.sharding.state(optimizer)


def _computed(output: Any) -> Any:
    """The output of a step of an evaluation; without this all its batches would be recorded as one program."""
    _compute_pending()
    return output


class FabricOneProcessXLAStrategy(fabric.SingleDeviceXLAStrategy):
    """The same for Fabric: a call of the model begins what is computed together, a step of the optimizer ends it."""

    def __init__(self, index: int, sharding: Sharding | None) -> None:
        import torch_xla

        fabric.SingleDeviceStrategy.__init__(self, torch_xla.device(index))  # as above
        self.sharding = sharding
        self.devices_per_rank = sharding.devices if sharding is not None else 1

    def setup_environment(self) -> None:
        """Seeds the device as `seed_everything` has seeded torch, which leaves XLA devices as they are."""
        super().setup_environment()
        seed_xla(torch.initial_seed())

    def module_to_device(self, module: Module) -> None:
        """The optimizer was made with the parameters on the CPU: they have to stay the same objects."""
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            super().module_to_device(module)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    def setup_module(self, module: Module) -> Module:
        """Splits the parameters, and from then on the batches that the module is called with.

        A loop may have seeded torch after `launch`, so the device is reseeded here.
        """
        module = super().setup_module(module)
        seed_xla(torch.initial_seed())
        if self.sharding is not None:
            self.sharding.parameters(module)
        module.register_forward_pre_hook(self._begin, with_kwargs=True)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """State that is restored is split as the parameters are."""
        optimizer = super().setup_optimizer(optimizer)
        if self.sharding is not None:
            optimizer.register_load_state_dict_post_hook(self.sharding.state)
        return optimizer

    def _begin(self, module: Module, args: Any, kwargs: Any) -> None:
        _compute_pending()
        if self.sharding is not None:
            self.sharding.batch((args, kwargs))
