"""Fabric's strategy on a device mesh."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.optim import Optimizer

from fairlead_distributed import clip_grad_norm
from fairlead_strategies.layout import Layout
from fairlead_strategies.mesh.config import MeshStrategyConfig
from fairlead_strategies.mesh.device_mesh import agree_on_random_numbers, make_mesh
from fairlead_strategies.mesh.parallelize import parallelize
from fairlead_strategies.mesh.ranks import RanksOnMesh
from fairlead_strategies.mesh.units import is_parallelised
from fairlead_strategies.mesh.whole import cut_optimizer


class FabricMesh(RanksOnMesh, ModelParallelStrategy):
    """Fabric's strategy for `fsdp2`, `tensor_parallel` and `hybrid`."""

    def __init__(self, config: MeshStrategyConfig, layout: Layout, **kwargs: Any) -> None:
        def split(module: Module, mesh: DeviceMesh) -> Module:
            return module if is_parallelised(module) else parallelize(module, mesh, config, self.root_device)

        super().__init__(split, layout.data_parallel, layout.tensor, **kwargs)
        self.name = config.name
        self.layout = layout

    def setup_environment(self) -> None:
        """Connects the ranks and makes the mesh; Lightning would make one of two dimensions."""
        super(ModelParallelStrategy, self).setup_environment()
        self._setup_distributed()
        self._device_mesh = make_mesh(self.layout, self.root_device)
        agree_on_random_numbers(self._device_mesh, self.root_device)

    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Torch's own cannot add up the norms of parameters on different dimensions of a mesh."""
        self.precision.unscale_gradients(optimizer)
        parameters = list(self.precision.main_params(optimizer))
        return clip_grad_norm(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Lightning takes a single process's numbers in an optimizer's state for those of the model's parameters.

        Where the optimizer has its groups in another order, moments would change places.
        """
        path = Path(self.broadcast(os.fspath(path)))
        if not isinstance(state, dict) or path.is_dir():
            return super().load_checkpoint(path, state, strict, weights_only)
        optimizers = {name: one for name, one in state.items() if isinstance(one, Optimizer)}
        others = {name: one for name, one in state.items() if name not in optimizers}
        left = super().load_checkpoint(path, others, strict, weights_only)
        for name, optimizer in optimizers.items():
            if name not in left:
                raise KeyError(f"{path} has no {name!r}; it has {', '.join(sorted(left)) or 'nothing more'}")
            optimizer.load_state_dict(cut_optimizer(left.pop(name), optimizer))
        state.update(others)
        return left
