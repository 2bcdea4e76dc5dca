"""A model sharded by torch's `fully_shard`, for a custom training loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import nn

from fairlead.errors import ConfigError
from fairlead_distributed.activation_checkpointing import checkpoint_layer, checkpoint_layers, find_layers
from fairlead_distributed.info import get_local_rank, get_world_size, require_initialized
from fairlead_distributed.objects import gather_objects
from fairlead_distributed.process_group import rank_device

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

ShardingStrategyName = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
_NAMES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


class AdvancedFSDPManager:
    """Shards a model with torch's `fully_shard`: the settings now, the model and the process group later.

    Args:
        sharding_strategy: What is split over the ranks: `FULL_SHARD` parameters, gradients and optimizer state;
            `SHARD_GRAD_OP` keeps the parameters gathered between forward and backward; `NO_SHARD` nothing, as DDP;
            `HYBRID_SHARD` splits within a node and copies across nodes.
        mixed_precision: True: compute and reduce in bfloat16. None or False: in the parameters' own format. Or torch's
            `MixedPrecisionPolicy`.
        cpu_offload: Keep the shards in CPU memory while they are not computed with.
        activation_checkpointing: True: the layers of the model (the items of its `ModuleList`s and `Sequential`s)
            recompute their activations in the backward pass. Or the classes of the layers that do.

    Raises:
        ConfigError: There is no such sharding strategy.

    Example:
        >>> manager = AdvancedFSDPManager(sharding_strategy="SHARD_GRAD_OP", activation_checkpointing=True)
        >>> model = manager.wrap_model(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)))
        >>> model(torch.ones(3, 2)).shape
        torch.Size([3, 1])
    """

    def __init__(
        self,
        sharding_strategy: ShardingStrategyName = "FULL_SHARD",
        mixed_precision: bool | MixedPrecisionPolicy | None = None,
        cpu_offload: bool = False,
        activation_checkpointing: bool | Collection[type[nn.Module]] = False,
    ) -> None:
        if sharding_strategy not in _NAMES:
            raise ConfigError(
                f"there is no sharding strategy {sharding_strategy!r}",
                where="AdvancedFSDPManager(sharding_strategy=)",
                fix=f"choose one of: {', '.join(_NAMES)}",
            )
        self.sharding_strategy = sharding_strategy
        self.mixed_precision = mixed_precision
        self.cpu_offload = cpu_offload
        self.activation_checkpointing = activation_checkpointing

    def wrap_model(self, model: nn.Module, *, device: torch.device | str | None = None) -> nn.Module:
        """The model, sharded over all ranks, each layer one unit; every rank starts from rank 0's values.

        It is the same object with other parameters, so that the optimizer is made afterwards. In one process without a
        group the model is returned unsplit, so that a script is the same there.

        Args:
            model: The model; its parameters are replaced in place. Those on the meta device get their values
                afterwards, by `to_empty` and `reset_parameters`.
            device: The kind of this rank's device. None: its GPU where the group sends through NCCL, else the CPU.

        Raises:
            ConfigError: A class in `activation_checkpointing` is none of the model's.
            NotInitializedError: The launcher started several processes, and this one has not joined them yet.
        """
        checkpointing = self.activation_checkpointing
        layers = find_layers(model).values()
        if checkpointing is True:
            for layer in layers:
                checkpoint_layer(layer)
        elif checkpointing:
            checkpoint_layers(model, checkpointing)
        if not require_initialized("AdvancedFSDPManager.wrap_model"):
            return model
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        if device is None:
            device = rank_device() if "nccl" in str(dist.get_backend_config()) else "cpu"
        device = torch.device(device)
        for tensor in (*model.parameters(), *model.buffers()):
            _from_rank_0(tensor, device)
        copies, shards = _mesh_sizes(self.sharding_strategy)
        mesh = init_device_mesh(device.type, (copies, shards), mesh_dim_names=("replicate", "shard"))
        if copies == 1:
            mesh = mesh["shard"]
        offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if self.cpu_offload else OffloadPolicy()
        policy, reshard = _policy(self.mixed_precision), self.sharding_strategy not in _KEEP_GATHERED
        for layer in _units(model, layers):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)
        # The backward pass needs the root at once, so that freeing it would only cost a second gather.
        fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=offload)
        return model


_KEEP_GATHERED = ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")


def _mesh_sizes(sharding_strategy: str) -> tuple[int, int]:
    """Copies of the model, and ranks that share the shards of each: for the hybrids nodes, and ranks of a node."""
    world = get_world_size()
    if "HYBRID" not in sharding_strategy:
        return (world, 1) if sharding_strategy == "NO_SHARD" else (1, world)
    nodes = gather_objects(get_local_rank()).count(0)
    if not nodes or world % nodes:
        raise ConfigError(
            f"{world} ranks on {nodes} nodes",
            where=f"sharding_strategy={sharding_strategy!r}",
            why="a model is split within a node and copied across nodes, so that each needs equally many ranks",
            fix="start equally many ranks on each node, or take FULL_SHARD",
        )
    return (nodes, world // nodes)


def _policy(requested: bool | MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if requested is True:
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return requested or MixedPrecisionPolicy()


@torch.no_grad()
def _from_rank_0(tensor: torch.Tensor, device: torch.device) -> None:
    """Copies rank 0's values to all ranks, in place; what has no values yet is left out."""
    if tensor.is_meta:
        return
    there = tensor.to(device)
    dist.broadcast(there, src=0)
    if there is not tensor:
        tensor.copy_(there)


def _units(model: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The layers that can be units: a parameter that is shared with another layer can live in one unit only."""
    uses = _uses(model)
    return [layer for layer in layers if all(uses[p] == n for p, n in _uses(layer).items())]


def _uses(module: nn.Module) -> Counter[int]:
    return Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
