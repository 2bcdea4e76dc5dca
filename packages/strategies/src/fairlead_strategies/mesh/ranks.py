"""What Lightning asks a strategy about its ranks, answered from a mesh: for the Trainer's and for Fabric's."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader

from fairlead_strategies.layout import Layout


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

    def process_dataloader(self, dataloader: object) -> object:
        """Seeds the workers of a loader by the replica.

        Lightning would seed them by the rank, and each rank of a replica would augment a sample in another way.
        """
        if isinstance(dataloader, DataLoader) and dataloader.worker_init_fn is None:
            rank = self.layout.data_rank(self.global_rank)
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
        return dataloader
