"""What `fsdp2` contributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from fairlead import Finding, StrategyPlugin, hookimpl
from fairlead.capabilities import Capability
from fairlead.findings import Inexact
from fairlead.resolve import Resolution
from fairlead_strategies.fields import LIGHTNING
from fairlead_strategies.fsdp2.config import FSDP2StrategyConfig

__all__ = ["FSDP2", "fsdp2"]


class FSDP2(StrategyPlugin):
    """Fully sharded data parallel, torch's second generation."""

    config = FSDP2StrategyConfig
    runtime = "fairlead_strategies.fsdp2.runtime:build"
    sharded_state = True
    engines = LIGHTNING
    extra = "lightning"
    codes: ClassVar[Mapping[str, str]] = {
        "fsdp2-checkpoint-io": "`save_distributed_checkpoint` does not fit `checkpoint_io`.",
        "fsdp2-sizes": "Data and tensor parallel sizes do not multiply to the number of ranks.",
    }

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """What Lightning or torch refuse together with FSDP2."""

        def no(others: tuple[str, ...], reason: str, fix: str) -> Capability:
            return Capability("strategy.fsdp2", others, "no", reason, fix)

        yield no(
            ("accelerator.mps",),
            "MPS is a single device, and Lightning refuses parallel strategies on it",
            "strategy: single_device",
        )
        yield no(("accelerator.xla",), "Lightning drives XLA devices only through its XLA strategies", "strategy: xla")
        yield no(
            ("precision.16-mixed", "precision.64-true", "precision.transformer-engine"),
            "Lightning's ModelParallelStrategy allows 32-true, bf16-mixed, bf16-true and 16-true only",
            "precision: bf16-mixed",
        )
        yield no(
            ("precision.bitsandbytes", "precision.deepspeed", "precision.fsdp", "precision.xla"),
            "this precision belongs to another strategy, or keeps weights in a form that cannot be sharded",
            "precision: 32-true, bf16-mixed or bf16-true",
        )

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
        backend = resolution.backend if config.process_group_backend == "auto" else config.process_group_backend
        doubts = {
            "save_distributed_checkpoint: true": (
                bool(config.save_distributed_checkpoint) and not resolution.checkpoint_io.saves_shards
            ),
            f"tensor_parallel_size: {config.tensor_parallel_size}": config.tensor_parallel_size > 1,
            f"{resolution.world_size} ranks over {backend}": backend != "gloo" and resolution.world_size > 2,
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
