"""What `expert` does to a model, and which ranks hold what of it.

The ranks of `expert` are data ranks, as in torchtitan and Megatron: each reads different samples, and their tokens
travel to the experts and back. So `expert` adds no ranks; it groups those of `shard`, neighbours together, for these
exchange most. Expert e lies on every `expert`-th of the data ranks (times those that share a sequence or split layers,
of whose tokens each sends a part). They are its *owners*: `fully_shard` shards it over them and averages its gradients
over them, and over their copies. Each stage of a pipeline has its ranks, mixtures and owners.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import Module

from fairlead.errors import ConfigError
from fairlead_distributed.parallel.expert import AbsentExpert, parallelize_experts


@dataclass(frozen=True)
class ExpertMeshes:
    """The ranks between which experts are divided.

    Attributes:
        exchange: Those with which this one exchanges tokens; each has other experts.
        owners: For each of these, all that hold the same experts as it does.
        same: Those that have the same tokens as this one, and split layers; None: no others.
    """

    exchange: DeviceMesh
    owners: list[DeviceMesh]
    same: DeviceMesh | None

    @classmethod
    def of(cls, mesh: DeviceMesh, ranks: int) -> ExpertMeshes:
        """Those of a mesh in which so many ranks of `shard` share the experts; a collective of all ranks."""
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        stages, replicas, context, tensor = (
            sizes.get(name, 1) for name in ("pipeline", "replicate", "context", "tensor")
        )
        # Neighbours in `shard` exchange tokens; ranks that share a sequence or split layers hold the same experts.
        numbers = mesh.mesh.view(stages, replicas, sizes["shard"] // ranks, ranks, context, tensor)
        neighbours = numbers.movedim(3, -1).reshape(-1, ranks)
        exchange = DeviceMesh(mesh.device_type, neighbours, mesh_dim_names=("others", "expert"))["expert"]
        stage = mesh.get_local_rank("pipeline") if stages > 1 else 0
        owners = []
        for index in range(stages):
            for number in range(ranks):
                held = numbers[index, :, :, number].reshape(replicas, -1)
                # All ranks make all of them: process groups are made together.
                if replicas > 1:
                    made = DeviceMesh(mesh.device_type, held, mesh_dim_names=("replicate", "expert_shard"))
                else:
                    made = DeviceMesh(mesh.device_type, held[0], mesh_dim_names=("expert_shard",))
                if index == stage:
                    owners.append(made)
        return cls(exchange, owners, mesh["tensor"] if tensor > 1 else None)


def lists_of_experts(module: Module) -> list[nn.ModuleList]:
    """The experts of each mixture in a model."""
    found = [getattr(one, "experts", None) for one in module.modules()]
    return [experts for experts in found if isinstance(experts, nn.ModuleList)]


class Experts:
    """The experts of a model, divided in place: each rank holds its own.

    The others' stay as parameters without values, under their names: so all ranks name the same parameters in the same
    order, in optimizers and checkpoints. After `shard` these are DTensors that lie on their owners.

    Args:
        module: A model with mixtures, with values.
        meshes: The ranks that share them.

    Raises:
        ConfigError: See `parallelize_experts`; or an expert holds what is not its own parameters.
    """

    def __init__(self, module: Module, meshes: ExpertMeshes) -> None:
        self._lists = lists_of_experts(module)
        self._inside = {id(part) for experts in self._lists for part in experts.modules()}
        self._owners = meshes.owners
        self._refuse(module)
        before = [{n: p.requires_grad for n, p in experts.named_parameters()} for experts in self._lists]
        parallelize_experts(module, meshes.exchange, meshes.same)
        for experts, trained in zip(self._lists, before, strict=True):
            for number, expert in enumerate(experts):
                if isinstance(expert, AbsentExpert):
                    for name, tensor in expert.tensors.items():
                        parameter = nn.Parameter(tensor, requires_grad=trained[f"{number}.{name}"])
                        _register(expert, name, parameter)
        self._rank = meshes.exchange.get_local_rank()

    def _refuse(self, module: Module) -> None:
        names = {id(part): name for name, part in module.named_modules()}
        for experts in self._lists:
            where = names[id(experts)]
            buffers = [name for name, _ in experts.named_buffers()]
            if buffers:
                raise ConfigError(
                    f"the expert has the buffer {buffers[0]!r}",
                    where=f"{where}.{buffers[0]}",
                    why="what an expert's forward notes would be on its own ranks only, and in no checkpoint",
                    fix="build experts of layers without buffers (no batch norm), or leave `expert` out",
                )
        own = [id(p) for experts in self._lists for one in experts for p in one.parameters()]
        outside = [
            id(p) for part in module.modules() if id(part) not in self._inside for p in part.parameters(recurse=False)
        ]
        if len(set(own)) < len(own) or set(own) & set(outside):
            raise ConfigError(
                "an expert shares a parameter with another or with the rest of the model",
                where="trainer.strategy.expert",
                why="they are on different ranks, and each would train its own copy",
                fix="give each expert its own parameters, or leave `expert` out",
            )

    def without(self, units: Iterable[Module]) -> list[Module]:
        """The units that are no experts: those of a mixture are one unit."""
        return [unit for unit in units if id(unit) not in self._inside]

    def shard(self, device: torch.device, options: Mapping[str, Any], *, reshard: bool) -> None:
        """Shards the experts of each mixture over their owners; before what is around them is sharded.

        Args:
            device: The device of the parameters.
            options: Of `fully_shard`, but for the mesh.
            reshard: Whether they are freed after their forward.
        """
        for experts in self._lists:
            each = len(experts) // len(self._owners)
            elsewhere = set()
            for number, expert in enumerate(experts):
                if isinstance(expert, AbsentExpert):
                    for name, parameter in list(expert.named_parameters()):
                        elsewhere.add(_register(expert, name, _on(self._owners[number // each], parameter, device)))
            mesh = self._owners[self._rank]
            fully_shard(experts, mesh=mesh, reshard_after_forward=reshard, ignored_params=elsewhere, **options)


def _on(owners: DeviceMesh, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A parameter as `fully_shard` lays it out on its owners, seen from a rank that is none of them."""
    placements = [Replicate(), Shard(0)][-owners.ndim :]
    empty = torch.empty(0, dtype=parameter.dtype, device=device)
    shape, stride = parameter.shape, parameter.stride()
    there = DTensor.from_local(empty, owners, placements, run_check=False, shape=shape, stride=stride)
    return nn.Parameter(there, requires_grad=parameter.requires_grad)


def _register(expert: Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
    """Puts a parameter where the expert's own layers had it."""
    *path, last = name.split(".")
    parent = expert
    for part in path:
        if part not in parent._modules:
            parent.add_module(part, nn.Module())
        parent = parent.get_submodule(part)
    parent.register_parameter(last, parameter)
    return parameter
