"""A way to lay a job out over devices: everything that a plan chooses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from fairlead_strategies.layout import Layout as Mesh

STRATEGIES: Final = ("single_device", "ddp", "fsdp2", "hybrid", "deepspeed")
"""Those that can be planned."""
Checkpointing = Literal["none", "selective", "full"]
"""What of a unit's activations is recomputed: nothing; all but matrix products and attention; everything."""
Sharding = Literal["none", "optimizer", "gradients", "full"]
"""What the ranks of the mesh's `shard` (ZeRO 1, 2, 3: all data-parallel ranks) share out."""


@dataclass(frozen=True)
class Layout:
    """The sizes of a mesh, the batch, and what is recomputed."""

    strategy: str
    """The strategy's tag in a job file: `ddp`, `fsdp2`, `hybrid`."""
    mesh: Mesh = field(default_factory=Mesh)
    micro_batch: int = 1
    """Samples of one forward pass of one rank."""
    accumulation: int = 1
    """Forward passes of a rank in one optimizer step; with a pipeline, the micro-batches that go through its stages."""
    checkpointing: Checkpointing = "none"
    sharding: Sharding = "none"
    one_unit: bool = False
    """With `sharding: full`: the model is gathered as one unit, as with an empty `auto_wrap_policy`."""
    sequence: bool = False
    """Sequence parallelism beside tensor parallelism: what lies between the split layers is divided as well."""
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    cast: bool = False
    """Sharded parameters are cast to 16 bits when they are gathered (FSDP2's `mixed_precision`), instead of by autocast
    in each operator."""
    bucket: int = 200_000_000
    """Elements of DeepSpeed's buckets of gradients, which it reserves whatever the size of the model."""
    offload: bool = False
    """Optimizer states, and the step, on the host."""

    @property
    def devices(self) -> int:
        """How many ranks."""
        one = self.mesh
        return one.pipeline * one.replicate * one.shard * one.context * one.tensor

    @property
    def data_parallel(self) -> int:
        """On how many ranks a part of the batch lies."""
        return self.mesh.replicate * self.mesh.shard

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step."""
        return self.micro_batch * self.accumulation * self.data_parallel
