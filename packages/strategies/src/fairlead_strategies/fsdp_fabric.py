"""Fabric's FSDP on any device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import FSDPStrategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import enable_wrap
from torch.nn import Module
from torch.optim import Optimizer

from fairlead_distributed import fsdp_state
from fairlead_strategies.fsdp_wrapping import Classes, autocast_on, layer_wrapper, wrap_rest, wrapping_options


class FabricFSDP(FSDPStrategy):
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
        """All parameters of a module that was set up, by their names, whole and on the CPU; on all ranks together."""
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
        """As Lightning does; whole states on a CPU are gathered here, where its way ends in a segmentation fault."""
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
