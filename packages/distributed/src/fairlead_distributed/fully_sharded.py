"""Torch's first FSDP around a model, on GPUs and on CPUs; for a custom training loop, and for `strategy: fsdp`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairlead.errors import ConfigError
from fairlead_distributed._sharded import is_fsdp1
from fairlead_distributed.activation_checkpointing import checkpoint_layer, checkpoint_layers, find_layers
from fairlead_distributed.info import get_local_rank, get_world_size, require_initialized
from fairlead_distributed.objects import gather_objects
from fairlead_distributed.process_group import rank_device

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

ShardingStrategyName = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
_NAMES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


class AdvancedFSDPManager:
    """Wraps a model in torch's first FSDP: the settings now, the model and the process group later.

    Args:
        sharding_strategy: What is split over the ranks: `FULL_SHARD` parameters, gradients and optimizer state;
            `SHARD_GRAD_OP` keeps the parameters gathered between forward and backward; `NO_SHARD` nothing, as DDP;
            `HYBRID_SHARD` splits within a node and copies across nodes.
        mixed_precision: True: compute, reduce and buffer in bfloat16. None or False: in the parameters' own format. Or
            torch's `MixedPrecision`.
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
        mixed_precision: bool | MixedPrecision | None = None,
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

        An optimizer may be made before or after. In one process without a group the model is returned unsplit, so that
        a script is the same there.

        Args:
            model: The model; its parameters are taken apart in place.
            device: This rank's device. None: its GPU where the group sends through NCCL, else the CPU.

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
        from torch.distributed.fsdp import CPUOffload, ShardingStrategy
        from torch.distributed.fsdp.wrap import CustomPolicy

        if device is None:
            device = rank_device() if "nccl" in str(dist.get_backend_config()) else "cpu"
        device = torch.device(device)
        units = _units(model, layers)
        return wrap_fsdp(
            model,
            device,
            sharding_strategy=ShardingStrategy[self.sharding_strategy],
            mixed_precision=mixed_precision_of(self.mixed_precision),
            cpu_offload=CPUOffload(offload_params=self.cpu_offload),
            auto_wrap_policy=CustomPolicy(lambda module: id(module) in units),
            device_mesh=init_device_mesh(device.type, _mesh_sizes(self.sharding_strategy)),
            use_orig_params=True,
        )


def _mesh_sizes(sharding_strategy: str) -> tuple[int, ...]:
    """The sizes of the mesh of all ranks: (ranks,), or for the hybrids (nodes, ranks of a node)."""
    world = get_world_size()
    if "HYBRID" not in sharding_strategy:
        return (world,)
    nodes = gather_objects(get_local_rank()).count(0)
    if not nodes or world % nodes:
        raise ConfigError(
            f"{world} ranks on {nodes} nodes",
            where=f"sharding_strategy={sharding_strategy!r}",
            why="a model is split within a node and copied across nodes, so that each needs equally many ranks",
            fix="start equally many ranks on each node, or take FULL_SHARD",
        )
    return (nodes, world // nodes)


def mixed_precision_of(requested: bool | MixedPrecision | None) -> MixedPrecision | None:
    """Torch's policy for `mixed_precision`: True is bfloat16 for everything."""
    from torch.distributed.fsdp import MixedPrecision

    if requested is True:
        half = torch.bfloat16
        return MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half)
    return requested or None


def wrap_fsdp(
    module: nn.Module, device: torch.device, *, sync_module_states: bool = True, **options: Any
) -> FullyShardedDataParallel:
    """`FullyShardedDataParallel(module, **options)` on this rank's device, which may be a CPU.

    `sync_module_states` copies the values of rank 0 to all ranks, before they are taken apart. On a CPU `cpu_offload`
    has nothing to do: the shards are in its memory.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    if device.type != "cpu":
        return FullyShardedDataParallel(
            module, device_id=device.index, sync_module_states=sync_module_states, **options
        )
    options.pop("cpu_offload", None)  # torch would pin their memory, for which it needs an accelerator
    # Torch itself copies between GPUs only.
    if sync_module_states:
        broadcast_module(module)

        def materialize(part: nn.Module) -> None:
            part.to_empty(device=device, recurse=False)
            reset: Any = getattr(part, "reset_parameters", None)
            if reset is not None:
                reset()
            broadcast_module(part, recurse=False)

        options.setdefault("param_init_fn", materialize)
    return FullyShardedDataParallel(module, device_id=device, **options)


@torch.no_grad()
def broadcast_module(module: nn.Module, *, recurse: bool = True) -> None:
    """Copies rank 0's parameters and buffers to all ranks, but for those that are sharded or have no values yet."""
    units = (part for part in module.modules() if is_fsdp1(part))
    sharded = {id(one) for unit in units for one in (*unit.parameters(), *unit.buffers())}
    tensors: Iterable[Tensor] = (*module.parameters(recurse), *module.buffers(recurse))
    for tensor in tensors:
        if not tensor.is_meta and id(tensor) not in sharded:
            dist.broadcast(tensor, src=0)


def _units(model: nn.Module, layers: Iterable[nn.Module]) -> set[int]:
    """The layers that can be units: a parameter that is shared with another layer can live in one unit only."""
    uses = _uses(model)
    return {id(layer) for layer in layers if all(uses[p] == n for p, n in _uses(layer).items())}


def _uses(module: nn.Module) -> Counter[int]:
    return Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
