"""What the strategies on a device mesh contribute: rows of the capability table, findings, their word on exactness."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from fairlead import Capability, Finding, Resolution, hookimpl
from fairlead.engines import too_old
from fairlead.errors import ConfigError
from fairlead.findings import Inexact
from fairlead_strategies.layout import Layout
from fairlead_strategies.mesh.config import MeshStrategyConfig
from fairlead_strategies.shared import LightningStrategy


class MeshStrategy(LightningStrategy):
    """The base of the plugins whose runtime is one device mesh."""

    runtime = "fairlead_strategies.mesh.build:build"
    sharded_state = True
    codes: ClassVar[Mapping[str, str]] = {
        "mesh-checkpoint-io": "`save_distributed_checkpoint` does not fit `checkpoint_io`.",
        "mesh-layout": "How the ranks are laid out, and which size was worked out from the others.",
        "mesh-offload": "The process group of a run with `cpu_offload` cannot reduce what lies in CPU memory.",
        "mesh-sizes": "The sizes of the mesh do not multiply to the number of ranks.",
        "mesh-tensor-nodes": "The ranks that split each layer lie on several nodes.",
    }

    @hookimpl
    def fairlead_capabilities(self) -> Iterable[Capability]:
        """What Lightning or torch refuse together with a mesh."""
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
        """Sizes and fields that do not fit the rest of the run."""
        config = resolution.strategy
        assert isinstance(config, MeshStrategyConfig)
        try:
            layout = config.layout(resolution.world_size)
        except ConfigError as error:
            yield Finding.of(error, "error", "mesh-sizes", where=error.where or "trainer.strategy")
            return
        if layout.expert > 1 or (layout.auto is not None and len(layout.dimensions()) > 1):
            yield Finding("info", "mesh-layout", f"mesh: {layout.explained()}", where="trainer.strategy")
        for name in ("pipeline", "expert"):
            old = too_old(name, where=f"trainer.strategy.{name}") if getattr(layout, name) > 1 else None
            if old is not None:
                yield Finding.of(old, "error", "engine-too-old")
        yield from self.tensor_nodes(layout, resolution)
        yield from checkpoint_findings(config, resolution)
        if config.cpu_offload and resolution.device_type != "cpu" and "gloo" not in resolution.backend:
            yield Finding(
                "error",
                "mesh-offload",
                f"the backend {resolution.backend!r} cannot reduce what lies in CPU memory",
                where="trainer.strategy.process_group_backend",
                why="with cpu_offload the gradients are on the CPU when their norm is computed",
                fix=f'process_group_backend: "cpu:gloo,{resolution.device_type}:{resolution.backend}"',
            )

    def tensor_nodes(self, layout: Layout, resolution: Resolution) -> Iterator[Finding]:
        """Where the ranks of a tensor group lie on several nodes."""
        if resolution.num_nodes > 1 and resolution.devices % layout.tensor:
            yield Finding(
                "warning",
                "mesh-tensor-nodes",
                f"tensor {layout.tensor} over nodes of {resolution.devices} devices",
                where="trainer.strategy.tensor",
                why="the ranks that split each layer exchange activations several times in it, here over the network",
                fix=f"tensor: {resolution.devices} or a divisor of it, and the rest for shard or replicate",
            )

    @hookimpl
    def fairlead_exactness(self, resolution: Resolution) -> Iterator[Inexact]:
        """Shown on CPUs with whole checkpoints: a unit always reduces the same gradients together."""
        config = resolution.strategy
        assert isinstance(config, MeshStrategyConfig)
        doubts = {
            "save_distributed_checkpoint: true": (
                bool(config.save_distributed_checkpoint) and not resolution.checkpoint_io.saves_shards
            ),
            f"{resolution.world_size} ranks over {resolution.backend}": resolution.backend != "gloo"
            and resolution.world_size > 2,
        }
        for what, doubtful in doubts.items():
            if doubtful:
                yield Inexact(
                    f"strategy: {config.name} with {what}",
                    why="no test has resumed that",
                    fix="accelerator: cpu, and no distributed checkpoint past checkpoint_io, where it matters",
                    certain=False,
                )


def checkpoint_findings(config: MeshStrategyConfig, resolution: Resolution) -> Iterator[Finding]:
    """Whether parts or the whole can be saved as asked."""
    takes_shards, name = resolution.checkpoint_io.saves_shards, resolution.checkpoint_io.name
    where = "trainer.strategy.save_distributed_checkpoint"
    if config.save_distributed_checkpoint and not takes_shards:
        yield Finding(
            "warning",
            "mesh-checkpoint-io",
            f"checkpoint_io {name!r} does not write the checkpoints, it only commits them",
            where=where,
            why="Lightning has every rank write its own part of a distributed checkpoint, and the training waits",
            fix="checkpoint_io: distributed",
        )
    if config.save_distributed_checkpoint is False and takes_shards:
        yield Finding(
            "error",
            "mesh-checkpoint-io",
            f"checkpoint_io {name!r} writes the part of each rank, but rank 0 would gather all of it",
            where=where,
            fix="leave save_distributed_checkpoint out, or use checkpoint_io: torch",
        )
