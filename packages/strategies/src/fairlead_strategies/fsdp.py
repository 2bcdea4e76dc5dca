"""`fsdp`: the options of FullyShardedDataParallel, in front of the engine that `fsdp2` has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from fairlead_strategies.layout import Layout
from fairlead_strategies.mesh.config import MeshStrategyConfig
from fairlead_strategies.mesh.plugins import MeshStrategy

Devices = Annotated[int, Field(gt=0)]

_REMOVED: Final[Mapping[str, str]] = {
    "use_orig_params": "it always keeps the model's own parameters",
    "sync_module_states": "every rank always starts from the parameters of rank 0",
    "limit_all_gathers": "it always gathers one unit ahead, and no more",
    "forward_prefetch": "it always gathers one unit ahead",
    "backward_prefetch": "it always gathers one unit ahead",
}
"""Options of FullyShardedDataParallel that torch's `fully_shard` does not have, and what it does."""


class FSDPStrategyConfig(MeshStrategyConfig):
    """Fully sharded data parallel with torch's `fully_shard`, under the options of FullyShardedDataParallel.

    `fsdp2` is the same engine, and has the sizes of the mesh as its options. In `configure_model` torch's `wrap(layer)`
    makes a layer a unit; the rest of the module is sharded around those.

    Example:
        >>> FSDPStrategyConfig(activation_checkpointing=("torch.nn:TransformerEncoderLayer",)).sharding_strategy
        'FULL_SHARD'
        >>> str(FSDPStrategyConfig(sharding_strategy="HYBRID_SHARD").layout(8, num_nodes=2))
        'replicate 2 x shard 4'
    """

    name: Literal["fsdp"] = "fsdp"
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"] = (
        "FULL_SHARD"
    )
    """What is split: `FULL_SHARD` parameters, gradients and optimizer state; `SHARD_GRAD_OP` keeps the parameters
    gathered between forward and backward; `NO_SHARD` nothing, as DDP; the hybrids split within a node and copy across
    nodes."""
    device_mesh: tuple[Devices, Devices] | None = Field(None, strict=False)
    """For the hybrids: (number of copies, ranks that share one copy). None: one copy per node."""

    @model_validator(mode="before")
    @classmethod
    def _names_of_the_first_fsdp(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        removed = [f"torch's fully_shard has no `{name}`: {what}" for name, what in _REMOVED.items() if name in data]
        if removed:
            raise ValueError(f"{'; '.join(removed)}; leave {'it' if len(removed) == 1 else 'them'} out")
        short, long = "activation_checkpointing", "activation_checkpointing_policy"
        if short in data and long in data:
            raise ValueError(f"`{long}` is another name of `{short}`; give one of them")
        return {short if key == long else key: value for key, value in data.items()}

    @model_validator(mode="after")
    def _mesh_needs_hybrid(self) -> FSDPStrategyConfig:
        if self.device_mesh is not None and "HYBRID" not in self.sharding_strategy:
            raise ValueError("`device_mesh` has a meaning only with a hybrid `sharding_strategy`, such as HYBRID_SHARD")
        return self

    @property
    def frees_units(self) -> bool:
        """ZeRO stage 2 keeps the gathered parameters."""
        return self.sharding_strategy not in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")

    def layout(self, world_size: int, num_nodes: int = 1) -> Layout:
        """Shards over all ranks, over those of a node (the hybrids), or over none."""
        copies, shards = 1, world_size
        if self.sharding_strategy == "NO_SHARD":
            copies, shards = world_size, 1
        elif "HYBRID" in self.sharding_strategy:
            copies, shards = self.device_mesh or (num_nodes, world_size // num_nodes)
        return Layout.of(world_size, {"replicate": copies, "shard": shards})


class FSDP(MeshStrategy):
    """Fully sharded data parallel. `fsdp_native` is the same under its old name."""

    config = FSDPStrategyConfig
    scales_gradients = True


fsdp = FSDP()
fsdp_cpu_offload = FSDP(cpu_offload=True)
fsdp_native = FSDP(name="fsdp_native")  # a preset that only is another name
