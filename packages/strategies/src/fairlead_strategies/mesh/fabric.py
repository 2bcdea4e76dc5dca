"""Fabric's strategy on a device mesh."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.optim import Optimizer

from fairlead.errors import ConfigError
from fairlead_distributed import clip_grad_norm
from fairlead_strategies.layout import Layout
from fairlead_strategies.mesh.config import MeshStrategyConfig
from fairlead_strategies.mesh.device_mesh import RanksOnMesh, agree_on_random_numbers, make_mesh
from fairlead_strategies.mesh.full_state import (
    cut_model,
    cut_optimizer,
    forget_absent,
    model_on_first_rank,
    optimizer_on_first_rank,
)
from fairlead_strategies.mesh.parallelize import is_parallelised, parallelize, require_no_settings


class FabricMesh(RanksOnMesh, ModelParallelStrategy):
    """Fabric's strategy for `fsdp`, `fsdp2`, `tensor_parallel` and `hybrid`."""

    def __init__(self, config: MeshStrategyConfig, layout: Layout, **kwargs: Any) -> None:
        def split(module: Module, mesh: DeviceMesh) -> Module:
            if is_parallelised(module):
                require_no_settings(module, config)
                return module
            return parallelize(module, mesh, config, self.root_device)

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

    def save_checkpoint(
        self, path: str | os.PathLike[str], state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Lightning cannot gather experts that some ranks hold; their checkpoint is that of one process, on rank 0."""
        optimizers = [one for one in state.values() if isinstance(one, Optimizer)]
        forget_absent(optimizers)
        models = [one for one in state.values() if isinstance(one, Module) and is_parallelised(one)]
        if self.layout.expert == 1 or self._save_distributed_checkpoint or len(models) != 1:
            super().save_checkpoint(Path(path), state, storage_options, filter)
            return
        if storage_options is not None or filter is not None:
            raise ConfigError(
                "a model with divided experts is saved without storage_options and filter",
                where="fabric.save",
                fix="leave them out, or state_dict_type: sharded",
            )
        full: dict[str, Any] = {}
        for name, value in state.items():
            if value is models[0]:
                full[name] = model_on_first_rank(value, self.root_device)
            elif isinstance(value, Optimizer):
                full[name] = optimizer_on_first_rank(models[0], value, self.root_device)
            else:
                full[name] = value.state_dict() if hasattr(value, "state_dict") else value
        target = Path(self.broadcast(os.fspath(path)))
        if self.global_rank == 0:
            target.parent.mkdir(parents=True, exist_ok=True)
            torch.save(full, target)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Lightning takes a single process's numbers in an optimizer's state for those of the model's parameters.

        Where the optimizer has its groups in another order, moments would be exchanged.
        """
        path = Path(self.broadcast(os.fspath(path)))
        named = state if isinstance(state, dict) else {}
        optimizers = {name: one for name, one in named.items() if isinstance(one, Optimizer)}
        if path.is_dir():
            left = super().load_checkpoint(path, state, strict, weights_only)
            forget_absent(optimizers.values())
            return left
        if self.layout.expert == 1 and not named:
            return super().load_checkpoint(path, state, strict, weights_only)
        if isinstance(state, Module):
            full = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
            state.load_state_dict(cut_model(full, state), strict=strict)
            return {}
        others = {name: one for name, one in named.items() if name not in optimizers}
        load = super().load_checkpoint if self.layout.expert == 1 else _load_full
        left = load(path, others, strict, weights_only)
        for name, optimizer in optimizers.items():
            if name not in left:
                raise _missing(path, name, left)
            optimizer.load_state_dict(cut_optimizer(left.pop(name), optimizer))
        forget_absent(optimizers.values())
        named.update(others)
        return left


def _load_full(path: Path, state: dict[str, Any], strict: bool, weights_only: bool | None) -> dict[str, Any]:
    """What Lightning does, for models of which it cannot cut what some ranks do not hold; without communication."""
    found: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    for name, value in state.items():
        if name not in found:
            if strict:
                raise _missing(path, name, found)
        elif isinstance(value, Module):
            value.load_state_dict(cut_model(found.pop(name), value), strict=strict)
        elif hasattr(value, "load_state_dict"):
            value.load_state_dict(found.pop(name))
        else:
            state[name] = found.pop(name)
    return found


def _missing(path: Path, name: str, found: Iterable[str]) -> KeyError:
    return KeyError(f"{path} has no {name!r}; it has {', '.join(sorted(found)) or 'nothing more'}")
