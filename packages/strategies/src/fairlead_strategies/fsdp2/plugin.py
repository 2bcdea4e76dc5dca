"""Fully sharded data parallel, torch's second generation: the settings, and what it contributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field

from fairlead import Capability, Finding, Resolution, hookimpl
from fairlead.findings import Inexact
from fairlead_strategies.shared import ClassPaths, LightningStrategy, ProcessGroupConfig


class FSDP2StrategyConfig(ProcessGroupConfig):
    """Fully sharded data parallel with torch's `fully_shard`, on GPUs and CPUs.

    A module that parallelises itself in `configure_model` is left as it is. Any other is sharded
    here: its blocks, then the rest of it.

    Example:
        >>> FSDP2StrategyConfig(auto_wrap_policy=["my.layers:Block"]).auto_wrap_policy
        ('my.layers:Block',)
    """

    name: Literal["fsdp2"] = "fsdp2"
    auto_wrap_policy: ClassPaths | Literal["auto"] = "auto"
    """Which submodules are gathered and freed as one: a list of classes (`module:Class`); `auto` takes the items of
    the outermost `ModuleList`s, which is where models keep their layers. An empty list makes the whole model one
    unit."""
    reshard_after_forward: bool = True
    """Free the gathered parameters of a unit after its forward and gather them again for backward: least memory.
    False keeps them, as ZeRO stage 2 does: less communication."""
    data_parallel_size: int | Literal["auto"] = Field("auto")
    """Ranks that share the shards; `auto` is the number of ranks divided by `tensor_parallel_size` (Lightning's own
    `auto` is the number of nodes)."""
    tensor_parallel_size: int = Field(1, gt=0)
    """Ranks that split each layer. More than 1 needs a module that applies its own plan in `configure_model`."""
    save_distributed_checkpoint: bool | None = None
    """Default null: what `checkpoint_io` takes. With `distributed` every rank hands it its own part; any other gets a
    whole checkpoint, gathered on rank 0. True has Lightning write the parts itself where `checkpoint_io` does not take
    them, which holds up training until they are on disk; False always gathers (Lightning's default is True)."""


class FSDP2(LightningStrategy):
    """Fully sharded data parallel, torch's second generation."""

    config = FSDP2StrategyConfig
    runtime = "fairlead_strategies.fsdp2.runtime:build"
    sharded_state = True
    codes: ClassVar[Mapping[str, str]] = {
        "fsdp2-checkpoint-io": "`save_distributed_checkpoint` does not fit `checkpoint_io`.",
        "fsdp2-sizes": "Data and tensor parallel sizes do not multiply to the number of ranks.",
    }

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """What Lightning or torch refuse together with FSDP2."""
        yield from self.no_mps_and_xla()
        yield self.no(
            ("precision.16-mixed", "precision.64-true", "precision.transformer-engine"),
            "Lightning's ModelParallelStrategy allows 32-true, bf16-mixed, bf16-true and 16-true only",
            "precision: bf16-mixed",
        )
        reason = "it keeps weights in a form that cannot be sharded"
        yield self.no(("precision.bitsandbytes",), reason, "precision: 32-true, bf16-mixed or bf16-true")

    @hookimpl
    def fairlead_check(self, resolution: Resolution, environ: Mapping[str, str]) -> Iterator[Finding]:
        """Fields that do not fit the rest of the run."""
        config = resolution.strategy
        assert isinstance(config, FSDP2StrategyConfig)
        tensor, world = config.tensor_parallel_size, resolution.world_size
        data = world // tensor if config.data_parallel_size == "auto" else config.data_parallel_size
        if data * tensor != world:
            yield Finding(
                "error",
                "fsdp2-sizes",
                f"{data} (data) x {tensor} (tensor) is not the number of ranks, {world}",
                where="trainer.strategy",
                why="every rank has exactly one place in the mesh",
                fix="choose a `tensor_parallel_size` that divides the number of ranks, and `data_parallel_size: auto`",
            )
        takes_shards, name = resolution.checkpoint_io.saves_shards, resolution.checkpoint_io.name
        where = "trainer.strategy.save_distributed_checkpoint"
        if config.save_distributed_checkpoint and not takes_shards:
            yield Finding(
                "warning",
                "fsdp2-checkpoint-io",
                f"checkpoint_io {name!r} does not write the checkpoints, it only commits them",
                where=where,
                why="Lightning has every rank write its own part of a distributed checkpoint, and the training waits",
                fix="checkpoint_io: distributed",
            )
        if config.save_distributed_checkpoint is False and takes_shards:
            yield Finding(
                "error",
                "fsdp2-checkpoint-io",
                f"checkpoint_io {name!r} writes the part of each rank, but rank 0 would gather all of it",
                where=where,
                fix="leave save_distributed_checkpoint out, or use checkpoint_io: torch",
            )

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterator[Inexact]:
        """Shown on CPUs with whole checkpoints: a unit always reduces the same gradients together."""
        config = resolution.strategy
        assert isinstance(config, FSDP2StrategyConfig)
        doubts = {
            "save_distributed_checkpoint: true": (
                bool(config.save_distributed_checkpoint) and not resolution.checkpoint_io.saves_shards
            ),
            f"tensor_parallel_size: {config.tensor_parallel_size}": config.tensor_parallel_size > 1,
            f"{resolution.world_size} ranks over {resolution.backend}": resolution.backend != "gloo"
            and resolution.world_size > 2,
        }
        for what, doubtful in doubts.items():
            if doubtful:
                yield Inexact(
                    f"strategy: fsdp2 with {what}",
                    why="no test has resumed that",
                    fix="accelerator: cpu, and no tensor parallelism or distributed checkpoint, where it matters",
                    certain=False,
                )


fsdp2 = FSDP2()
