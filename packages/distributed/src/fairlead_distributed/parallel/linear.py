"""Linear layers whose weights are split over ranks, for custom models."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fairlead.errors import ConfigError
from fairlead_distributed.parallel._layers import Column, Row, check_divisible
from fairlead_distributed.process_group import rank_device

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]

L = TypeVar("L", bound="ColumnParallelLinear | RowParallelLinear")


def _from_linear(cls: type[L], linear: nn.Linear, mesh: DeviceMesh | None, **options: Any) -> L:
    new = cls.__new__(cls)
    new.__dict__.update({**linear.__dict__, "_parameters": dict(linear._parameters), **options})
    new._share(mesh)
    return new


class ColumnParallelLinear(Column, nn.Linear):
    """A linear layer whose output features are split over ranks; on one rank, `torch.nn.Linear`.

    The ranks start with the weights of the first. `state_dict()` has DTensors, whose `full_tensor()` is the whole
    weight, and `load_state_dict` takes full tensors as well. The output is not gathered: a `RowParallelLinear` takes
    it as it is.

    Args:
        in_features: Size of the input, which every rank has in full.
        out_features: Size of the output of all ranks together.
        bias: Add a bias, of which each rank has its own part.
        gather_output: Return the full output on every rank.
        mesh: A mesh of one dimension; by default all ranks of the process group.
        device: Where the weights are.
        dtype: Their type.

    Raises:
        ConfigError: The ranks cannot share the output features evenly, or the mesh has several dimensions.

    Example:
        >>> up, down = ColumnParallelLinear(8, 32), RowParallelLinear(32, 8)
        >>> down(torch.relu(up(torch.ones(2, 8)))).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.gather_output = gather_output
        self._share(mesh)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, gather_output: bool = False, mesh: DeviceMesh | None = None
    ) -> ColumnParallelLinear:
        """The same layer with its weights, split."""
        return _from_linear(cls, linear, mesh, gather_output=gather_output)

    def _share(self, mesh: DeviceMesh | None) -> None:
        mesh = one_dimension(mesh)
        if mesh is not None:
            where = f"ColumnParallelLinear({self.in_features}, {self.out_features})"
            check_divisible(self.out_features, mesh.size(), "output features", where)
            self.split(mesh)


class RowParallelLinear(Row, nn.Linear):
    """A linear layer whose input features are split over ranks; on one rank, `torch.nn.Linear`.

    It takes what a `ColumnParallelLinear` returns, and adds up what the ranks make of it: one all-reduce. The bias is
    added once, after that.

    Args:
        in_features: Size of the input of all ranks together.
        out_features: Size of the output, which every rank gets in full.
        bias: Add a bias, which every rank has in full.
        mesh: A mesh of one dimension; by default all ranks of the process group.
        device: Where the weights are.
        dtype: Their type.

    Raises:
        ConfigError: The ranks cannot share the input features evenly, or the mesh has several dimensions.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._share(mesh)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, mesh: DeviceMesh | None = None) -> RowParallelLinear:
        """The same layer with its weights, split."""
        return _from_linear(cls, linear, mesh)

    def _share(self, mesh: DeviceMesh | None) -> None:
        mesh = one_dimension(mesh)
        if mesh is not None:
            where = f"RowParallelLinear({self.in_features}, {self.out_features})"
            check_divisible(self.in_features, mesh.size(), "input features", where)
            self.split(mesh)


def one_dimension(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The mesh to split over (by default, all ranks), or None where there is one rank."""
    if mesh is None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        backends = dist.get_backend_config(dist.group.WORLD)
        kind = rank_device().type
        return DeviceMesh(kind if kind in backends or kind == "cpu" else "cpu", list(range(dist.get_world_size())))
    if mesh.ndim != 1:
        raise ConfigError(
            f"a mesh of {mesh.ndim} dimensions {mesh.mesh_dim_names}",
            why="a layer is split over one of them",
            fix='pass one dimension: mesh["tensor"]',
        )
    return mesh if mesh.size() > 1 else None
