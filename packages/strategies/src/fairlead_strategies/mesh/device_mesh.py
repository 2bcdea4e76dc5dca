"""The mesh of ranks that a layout describes, what ranks of one batch must have in common, and what Lightning asks."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader

from fairlead.errors import ConfigError
from fairlead_strategies.layout import Layout


def make_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """The mesh with the dimensions of `layout.dimensions()`, outermost first; a collective of all ranks."""
    if layout.world_size != dist.get_world_size():
        raise ConfigError(
            f"{layout} = {layout.world_size} is not the number of ranks, {dist.get_world_size()}",
            where="trainer.strategy",
            fix="start as many ranks as the sizes multiply to",
        )
    sizes = layout.dimensions()
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def lightnings_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """The same ranks with the two dimensions that Lightning promises to `configure_model`."""
    if layout.pipeline * layout.context * layout.expert > 1:
        raise ConfigError(
            "a module that parallelises itself has no pipeline, context or expert dimension",
            where="trainer.strategy",
            why="`device_mesh` has the dimensions data_parallel and tensor_parallel in `configure_model`",
            fix="leave `configure_model` out, or pipeline, context and expert at 1",
        )
    sizes = (layout.data_parallel, layout.tensor)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("data_parallel", "tensor_parallel"))


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """What `fully_shard` is applied over: one dimension of shards, or copies x shards.

    Ranks that share a sequence hold the same parameters and have gradients of other tokens, so they are shards too.
    """
    names = mesh.mesh_dim_names or ()
    shards = mesh["shard"]
    if "context" in names:
        shards = mesh["shard", "context"]._flatten("shard_context")
    if "replicate" not in names:
        return shards
    # Both keep `mesh` as their root, as `fully_shard` asks of parameters that tensor parallelism has split over it.
    if hasattr(DeviceMesh, "_concatenate"):
        return DeviceMesh._concatenate([mesh["replicate"], shards])
    return mesh["replicate", (shards.mesh_dim_names or ("shard",))[0]]  # an older torch finds flattened dimensions, too


def agree_on_random_numbers(mesh: DeviceMesh, device: torch.device) -> None:
    """Ranks that share a batch continue with the same global generators: those of the first of them. A collective.

    They load the same samples, and drop out the same elements of an activation that each of them holds. Dropout on
    what is split over them then drops the same positions of each part.
    """
    for name in ("pipeline", "context", "tensor"):
        if name not in (mesh.mesh_dim_names or ()):
            continue
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        box: list[Any] = [(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)]
        dist.broadcast_object_list(box, group=mesh.get_group(name), group_src=0)
        python, numpy, cpu, cuda = box[0]
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)


@torch.no_grad()
def from_first_rank(tensor: torch.Tensor, mesh: DeviceMesh, device: torch.device) -> None:
    """Copies the values of the first rank of a stage to its other ranks, in place."""
    if tensor.is_meta:
        return
    there = tensor.to(device)
    for name in mesh.mesh_dim_names or ():
        if name != "pipeline":  # other stages have other parameters
            dist.broadcast(there, group=mesh.get_group(name), group_src=0)
    if there is not tensor:
        tensor.copy_(there)


class RanksOnMesh:
    """A mixin for Lightning's ModelParallelStrategy, of which there are two unrelated ones.

    Attributes:
        layout: The sizes of the mesh.
        name: The literal of the strategy, for a module that asks `trainer.strategy.name`.
    """

    layout: Layout
    name: str
    global_rank: int

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which of the batches this rank takes: those of its replica, as the other ranks of it do."""
        return {"num_replicas": self.layout.data_parallel, "rank": self.layout.data_rank(self.global_rank)}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Seeds the workers of a loader by the replica.

        Lightning would seed them by the rank, and each rank of a replica would augment a sample in another way.
        """
        if isinstance(dataloader, DataLoader) and dataloader.worker_init_fn is None:
            rank = self.layout.data_rank(self.global_rank)
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
        return dataloader
