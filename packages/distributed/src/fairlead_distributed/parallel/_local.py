"""Parameters that are DTensors, and modules that compute with this rank's part of them.

The parameters of a split model are DTensors, all of them, on one mesh: then optimizers, clipping, `fully_shard` and
checkpoints know what each rank holds (and optimizers that take all tensors at once refuse a mixture with plain
tensors). The computation is on plain tensors: the module's code stays as it is, and what is sent is what we send.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from fairlead.errors import ConfigError
from fairlead_distributed.parallel._comm import copy_to_ranks


def distribute(parameter: Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """The parameter, spread over the mesh; the values are those of the mesh's first rank."""
    if isinstance(parameter, DTensor):
        raise ConfigError(
            f"a parameter of shape {tuple(parameter.shape)} is spread over a mesh already",
            why=f"its placements are {parameter.placements}",
            fix="split a model before `fully_shard`, and once",
        )
    spread = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement]), parameter.requires_grad)
    spread.__dict__.update(parameter.__dict__)  # attributes that users put on parameters
    return spread


def local(parameter: Tensor, summed: bool = False) -> Tensor:
    """This rank's part of a parameter, with the gradient's way back; a plain tensor is returned as it is.

    Args:
        parameter: A DTensor on a mesh of one dimension, or a plain tensor.
        summed: Every rank uses the full parameter, on a part of the activations: its gradients are added up.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    mesh = tensor_mesh(parameter)
    # mypy knows DTensor's methods as untyped.
    plain: Tensor = parameter.to_local(grad_placements=parameter.placements)
    return copy_to_ranks(plain, mesh.get_group()) if summed else plain


def tensor_mesh(parameter: DTensor) -> DeviceMesh:
    """The mesh that a parameter is spread over while its module runs."""
    mesh: DeviceMesh = parameter.device_mesh
    if mesh.ndim != 1:
        raise ConfigError(
            f"a parameter was read while it is sharded over the mesh dimensions {mesh.mesh_dim_names}",
            why="`fully_shard` gathers a module's parameters when its forward is called, and only then",
            fix="call the module that `fully_shard` was applied to, not one of its methods or layers alone",
        )
    return mesh


def group_of(parameter: Tensor) -> dist.ProcessGroup | None:
    """The group of ranks that a parameter is spread over, or None for a plain tensor."""
    return tensor_mesh(parameter).get_group() if isinstance(parameter, DTensor) else None


class WholeState(nn.Module):
    """Loads a state dict of full tensors into parameters that are spread: each rank takes its part."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, parameter in self._parameters.items():
            value = state_dict.get(prefix + name)
            is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
            if isinstance(parameter, DTensor) and is_plain and value.shape == parameter.shape:
                mesh, placements = parameter.device_mesh, parameter.placements
                # Every rank has the full tensor: nothing is sent.
                value = value.to(parameter.device)
                state_dict[prefix + name] = distribute_tensor(value, mesh, placements, src_data_rank=None)
        super()._load_from_state_dict(state_dict, prefix, *args)


class _LocalParameter:
    """A parameter's name on a class: reading it gives this rank's plain tensor."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        # Other libraries swap parameters for plain tensors: those are in `__dict__`.
        where = module._parameters if self.name in module._parameters else module.__dict__
        if self.name not in where:
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {self.name!r}")
        value = where[self.name]
        if not isinstance(value, DTensor) or value.device_mesh.ndim > 1:
            return value  # sharded by `fully_shard`, which looks for it here
        return local(value, module.__dict__["_summed_gradients"])

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__[self.name] = value

    def __delete__(self, module: nn.Module) -> None:
        del module.__dict__[self.name]


def derived(cls: type[nn.Module], base: type[nn.Module], names: frozenset[str] = frozenset()) -> type[nn.Module]:
    """A class of the same name, so that what looks for classes by name finds it, with `base` before `cls`.

    Args:
        cls: The class of a module.
        base: What is put before it.
        names: Parameters to be read as this rank's plain tensors.
    """
    key = (cls, base, names)
    if key not in _derived:
        _derived[key] = _derive(cls, base, names)
    return _derived[key]


_derived: dict[tuple[type, type, frozenset[str]], type[nn.Module]] = {}


def _derive(cls: type[nn.Module], base: type[nn.Module], names: frozenset[str]) -> type[nn.Module]:
    members: dict[str, Any] = {name: _LocalParameter(name) for name in names}
    about = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    bases = (cls,) if issubclass(cls, base) else (base, cls)
    return type(cls.__name__, bases, {**about, **members})


def read_locally(module: nn.Module, summed: bool = False) -> None:
    """Makes a module's code see plain tensors where its own parameters are DTensors.

    `named_parameters()`, `state_dict()` and optimizers see the DTensors. `module.weight` is computed at each reading:
    gradients and `requires_grad` are the parameter's, of `named_parameters()`.
    """
    names = frozenset(name for name, value in module._parameters.items() if isinstance(value, DTensor))
    if names:
        module.__dict__["_summed_gradients"] = summed
        module.__class__ = derived(type(module), WholeState, names)


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str | None:
    """Where a module's first floating tensor is among its arguments."""
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return next((at for at, v in arguments if isinstance(v, torch.Tensor) and v.is_floating_point()), None)
